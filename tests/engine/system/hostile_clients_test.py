"""What clients of `accelmgr serve` may try, and what it comes to: hostile_clients_test.py PROGRAM [unittest arguments].

Each test ends with a service that still serves. Slow clients are in tests/engine/service, where limits are short.
"""
import array
import contextlib
import grp
import json
import os
import pathlib
import pwd
import re
import socket
import sys
import time
import unittest

import serve_cli_test
from serve_cli_test import DONE, WATCHDOG_S, ServiceTest

MOST_CONNECTIONS = 128
MOST_HEADER_BYTES, MOST_BODY_BYTES = 8 * 1024, 64 * 1024
MOST_UNREAD_BYTES = 256 * 1024


def header_of(method, target, length=0, more=""):
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


class HostileClients(ServiceTest):
    def connect(self):
        connection = socket.socket(socket.AF_UNIX)
        self.addCleanup(connection.close)
        connection.settimeout(WATCHDOG_S)
        connection.connect(str(self.socket))
        return connection

    @staticmethod
    def read_all(connection):
        """What the service sends until it closes the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError):  # It had not read all.
            while part := connection.recv(65536):
                data += part
        return data.decode()

    def ask_raw(self, data):
        connection = self.connect()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # It has refused before the end.
            connection.sendall(data)
        return self.read_all(connection)

    def end_well(self, process):
        self.assertEqual(self.ask("step").returncode, DONE)
        self.end(process)

    def descriptors(self, process):
        return len(os.listdir(f"/proc/{process.pid}/fd"))

    def wait_for_descriptors(self, process, most):
        deadline = time.monotonic() + WATCHDOG_S
        while self.descriptors(process) > most:
            self.assertLess(time.monotonic(), deadline, f"{self.descriptors(process)} descriptors instead of {most}")

    # ---- Other users ----

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

    # ---- Requests ----

    def test_too_much_is_refused_with_the_limit(self):
        process = self.serve()
        header = header_of("GET", "/healthz", more="X: " + "x" * MOST_HEADER_BYTES + "\r\n")
        self.assertRegex(self.ask_raw(header), rf"^HTTP/1.1 431 [^\0]*a header may have {MOST_HEADER_BYTES} bytes")
        for length in (MOST_BODY_BYTES + 1, 10 ** 15):
            self.assertRegex(self.ask_raw(header_of("POST", "/v1/step", length)), r"^HTTP/1.1 413 ")
        self.end_well(process)

    def test_a_body_of_brackets_is_refused(self):
        process = self.serve()
        deep = MOST_BODY_BYTES // 2 - 100
        for body in ("[" * MOST_BODY_BYTES, "[" * deep + "]" * deep, '{"count":' + "[" * deep + "]" * deep + "}",
                     '{"count":' * 5000 + "1" + "}" * 5000):
            request = header_of("POST", "/v1/step", len(body), "Connection: close\r\n") + body.encode()
            self.assertRegex(self.ask_raw(request), r"^HTTP/1.1 400 [^\0]*bad_request", body[:20])
        self.end_well(process)

    def test_requests_that_are_sent_at_once_are_answered_in_order(self):
        process = self.serve()
        many = 500
        requests = b"".join(header_of("GET", f"/{number}") for number in range(many))
        answers = self.ask_raw(requests + header_of("GET", "/healthz", more="Connection: close\r\n"))
        self.assertEqual(re.findall(r"there is no /(\d+)", answers), [str(number) for number in range(many)])
        self.assertTrue(answers.endswith('{"alive":true}\n'), answers[-100:])
        self.end_well(process)

    def test_a_request_is_not_hidden_in_another_one(self):
        process = self.serve()
        for more in ("Transfer-Encoding: chunked\r\n", "Content-Length: 5\r\n"):
            request = header_of("POST", "/v1/zero_grad", 0, more + "Connection: close\r\n")
            answer = self.ask_raw(request + b"0\r\n\r\n" + header_of("POST", "/v1/stop"))
            self.assertRegex(answer, "^HTTP/1.1 400 ", more)
            self.assertEqual(answer.count("HTTP/1.1"), 1)
        self.end_well(process)

    def test_a_host_of_another_build_is_refused(self):
        process = self.serve()
        for build in ("0123456789abcdef", "", "x" * 1000):
            more = f"Connection: Upgrade\r\nUpgrade: accelmgr-host\r\nAccelmgr-Build: {build}\r\nAccelmgr-Host: old\r\n"
            answer = self.ask_raw(header_of("GET", "/v1/attach", more=more))
            self.assertRegex(answer, r"^HTTP/1.1 409 [^\0]*foreign_build")
        self.assertIsNone(self.status()["host"])
        self.end_well(process)

    # ---- Connections ----

    def test_descriptors_that_are_passed_are_closed(self):
        process = self.serve()
        self.ask("status")
        before = self.descriptors(process)
        reading, writing = os.pipe()
        for sent in range(0, 1000, 100):
            connection = self.connect()
            passed = array.array("i", [writing] * 100)
            connection.sendmsg([header_of("GET", "/healthz", more="Connection: close\r\n")],
                               [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            self.assertIn("alive", self.read_all(connection), sent)
            connection.close()
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self.assertEqual(pipe.read(), "")  # The last copy is closed.
        self.wait_for_descriptors(process, before)
        self.end_well(process)

    def test_half_open_connections_are_closed(self):
        process = self.serve()
        self.ask("status")
        before = self.descriptors(process)
        for sent in (b"", b"GET / HT", header_of("POST", "/v1/step", 100), header_of("GET", "/healthz")):
            halves = [self.connect() for _ in range(MOST_CONNECTIONS - 8)]
            for half in halves:
                half.sendall(sent)
                half.shutdown(socket.SHUT_WR)
            for half in halves:
                self.read_all(half)
            self.wait_for_descriptors(process, before)
            for half in halves:
                half.close()
        self.end_well(process)

    def test_one_connection_too_many_is_refused_and_those_that_are_there_go_on(self):
        process = self.serve()
        connections = [self.connect() for _ in range(MOST_CONNECTIONS)]
        for connection in connections:
            connection.sendall(header_of("GET", "/healthz"))
            self.assertIn(b"200 OK", connection.recv(4096))
        self.assertRegex(self.ask_raw(b""), r"^HTTP/1.1 503 [^\0]*too_many_connections")
        connections[0].sendall(header_of("GET", "/healthz"))
        self.assertIn(b"200 OK", connections[0].recv(4096))
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + WATCHDOG_S
        while self.ask("status").returncode != DONE:
            self.assertLess(time.monotonic(), deadline)
        self.end_well(process)

    def memory(self, process):
        return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{process.pid}/status").read_text())[1]) * 1024

    def test_subscribers_that_never_read_are_dropped(self):
        process = self.serve()
        self.ask("step", "--count", "1000")  # The next ones begin with 256 steps.
        before, many = self.memory(process), 40
        subscribers = [self.connect() for _ in range(many)]
        for subscriber in subscribers:
            subscriber.sendall(header_of("GET", "/v1/events?since=0"))
        reader = self.connect()
        reader.sendall(header_of("GET", "/v1/events"))
        seen = b""
        while b"event: host" not in seen:
            seen += reader.recv(65536)
        descriptors = self.descriptors(process)
        steps, deadline = 1000, time.monotonic() + 3 * WATCHDOG_S
        while self.descriptors(process) > descriptors - many:
            self.assertLess(time.monotonic(), deadline, f"after {steps} steps")
            made = json.loads(self.ask("step", "--json", "--count", "200").stdout)["steps"]
            steps += len(made)
            while f'"number":{steps},'.encode() not in seen:
                seen = seen[-100:] + reader.recv(65536)
        self.assertLess(self.memory(process) - before, many * MOST_UNREAD_BYTES + (8 << 20))
        for subscriber in subscribers:
            self.assertNotIn("event: closing", self.read_all(subscriber))
        self.end_well(process)


if __name__ == "__main__":
    serve_cli_test.PROGRAM = sys.argv.pop(1)
    unittest.main()
