// Makes a system call fail, or kill the process. So tests see what happens on other kernels and without
// memory, and whether a call is made at all.
#pragma once

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

namespace accelmgr::ipc::test {

/// Makes the kernel answer the system call `number` with the seccomp `action` for the rest of this process's
/// life: call it in a forked child.
inline void on_system_call(unsigned number, unsigned action) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, action),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = 4, .filter = filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

inline void fail_system_call(unsigned number, int error) {
  on_system_call(number, SECCOMP_RET_ERRNO | (static_cast<unsigned>(error) & SECCOMP_RET_DATA));
}

inline void die_of_system_call(unsigned number) { on_system_call(number, SECCOMP_RET_KILL_PROCESS); }

}  // namespace accelmgr::ipc::test
