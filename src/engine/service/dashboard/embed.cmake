# Makes one page of index.html, style.css and script.js, and writes it as a C++ source:
#
#   cmake -D SOURCE=FOLDER -D OUTPUT=FILE -P embed.cmake
#
# A browser runs the style and the script because the policy of the page names their SHA-256.
cmake_minimum_required(VERSION 3.25)

# hash_of(VARIABLE TEXT): the SHA-256 of the text, as a policy names it. CMake says it in hexadecimal digits. A policy has
# it in base64, whose digits have 6 bits.
function(hash_of variable text)
  set(digits ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/)
  string(SHA256 hex "${text}")
  string(APPEND hex 00)  # 33 bytes are 11 groups of 3.
  set(base64 "")
  foreach(group RANGE 0 60 6)
    string(SUBSTRING ${hex} ${group} 6 bytes)
    foreach(shift IN ITEMS 18 12 6 0)
      math(EXPR digit "(0x${bytes} >> ${shift}) & 63")
      string(SUBSTRING ${digits} ${digit} 1 digit)
      string(APPEND base64 ${digit})
    endforeach()
  endforeach()
  string(SUBSTRING ${base64} 0 43 base64)  # The last digit is of the byte that was appended.
  set(${variable} "'sha256-${base64}='" PARENT_SCOPE)
endfunction()

file(READ ${SOURCE}/index.html page)
foreach(part IN ITEMS style.css script.js)
  file(READ ${SOURCE}/${part} text)
  string(FIND "${page}" "/* ${part} */" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "index.html has no place for ${part}")
  endif()
  string(REPLACE "/* ${part} */" "${text}" page "${page}")
  hash_of(hash_of_${part} "${text}")
endforeach()
string(JOIN "; " policy
  "default-src 'none'" "style-src ${hash_of_style.css}" "script-src ${hash_of_script.js}" "connect-src 'self'"
  "img-src data:"
  "base-uri 'none'" "form-action 'none'" "frame-ancestors 'none'" "require-trusted-types-for 'script'")
file(WRITE ${OUTPUT} "// Made by src/engine/service/dashboard/embed.cmake.
#include \"engine/service/dashboard/dashboard.hpp\"

namespace accelmgr::service {

const std::string_view dashboard_page = R\"page(${page})page\";
const std::string_view dashboard_policy = \"${policy}\";

}  // namespace accelmgr::service
")
