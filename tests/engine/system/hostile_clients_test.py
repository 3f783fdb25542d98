"""What clients of `accelmgr serve` may try, and what it comes to: hostile_clients_test.py PROGRAM [unittest arguments].

Each test ends with a service that still serves. Other clients are in tests/engine/service, where limits are short.
"""
import contextlib
import grp
import os
import pwd
import socket
import sys
import unittest

import serve_cli_test
from serve_cli_test import DONE, WATCHDOG_S, ServiceTest


def header_of(method, target, length=0, more=""):
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


class HostileClients(ServiceTest):
    def ask_raw(self, data):
        """What the service sends until it closes the connection."""
        answer = b""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WATCHDOG_S)
            connection.connect(str(self.socket))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # It has refused before the end.
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):  # It had not read all.
                while part := connection.recv(65536):
                    answer += part
        return answer.decode()

    def end_well(self, process):
        self.assertEqual(self.ask("step").returncode, DONE)
        self.end(process)

    def as_another_user(self, groups):
        """What such a user gets for GET /v1/status: a status of HTTP, or the name of an error."""
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            answer = "nothing"
            try:
                nobody = pwd.getpwnam("nobody")
                os.setgroups(groups)
                os.setgid(nobody.pw_gid)
                os.setuid(nobody.pw_uid)
                answer = self.ask_raw(header_of("GET", "/v1/status", more="Connection: close\r\n")).split(" ")[1]
            except BaseException as error:
                answer = type(error).__name__
            finally:
                os.write(theirs, answer.encode())
                os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as answer:
            found = answer.read()
        os.waitpid(child, 0)
        return found

    @unittest.skipIf(os.geteuid() != 0, "only root can become another user")
    def test_another_user_is_refused_whatever_the_mode_of_the_socket_is(self):
        process = self.serve()
        self.folder.chmod(0o711)
        self.assertEqual(self.as_another_user([]), "PermissionError")
        self.socket.chmod(0o666)
        self.assertEqual(self.as_another_user([]), "403")
        self.end_well(process)

    @unittest.skipIf(os.geteuid() != 0, "only root can become another user")
    def test_members_of_the_group_alone_may_use_it(self):
        group, another = (found.gr_gid for found in grp.getgrall()[-2:])
        process = self.serve("--group", grp.getgrgid(group).gr_name)
        self.folder.chmod(0o711)
        self.assertEqual(self.as_another_user([group]), "200")
        self.assertEqual(self.as_another_user([another]), "PermissionError")
        self.socket.chmod(0o666)
        self.assertEqual(self.as_another_user([another]), "403")
        self.assertEqual(self.as_another_user([another, group]), "200")
        self.end_well(process)

    def test_what_hides_a_request_is_refused(self):
        process = self.serve()
        hidden = b"0\r\n\r\n" + header_of("POST", "/v1/stop")
        for more in ("Transfer-Encoding: chunked\r\n", "Content-Length: 5\r\n"):
            answer = self.ask_raw(header_of("POST", "/v1/zero_grad", 0, more + "Connection: close\r\n") + hidden)
            self.assertRegex(answer, "^HTTP/1.1 400 ")
            self.assertEqual(answer.count("HTTP/1.1"), 1)
        self.end_well(process)


if __name__ == "__main__":
    serve_cli_test.PROGRAM = sys.argv.pop(1)
    unittest.main()
