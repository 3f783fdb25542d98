"""Tests of the dashboard of a service in a browser without a window: dashboard_test.py PROGRAM [unittest arguments].

They need Chromium and selenium, which `tools/setup --all` installs. Without them the exit code is 77.
"""
import http.server
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import unittest

import serve_cli_test
from serve_cli_test import DONE, WATCHDOG_S, ServiceTest

try:
    from selenium import webdriver
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError:
    webdriver = None

SKIPPED = 77
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
THREE = ["--set", "runners.max_runners=3"]
HOSTILE = "<img src=x onerror=alert(1)>"


class Door:
    """Listens at one port of this machine, and passes on what comes to the service of the moment.

    A service that is started again may find its port taken.
    """

    def __init__(self):
        self.target = None  # HOST:PORT, or the path of a Unix socket.
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.origin = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(WATCHDOG_S)
        self.listener.close()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        target = str(self.target)
        with client, socket.socket(socket.AF_UNIX if target.startswith("/") else socket.AF_INET) as service:
            try:
                service.connect(target if target.startswith("/") else ("127.0.0.1", int(target.rpartition(":")[2])))
            except (OSError, ValueError):
                return
            back = threading.Thread(target=self.pump, args=(service, client), daemon=True)
            back.start()
            self.pump(client, service)
            back.join()

    @staticmethod
    def pump(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):  # One half alone is of no use to HTTP.
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class OtherSite(http.server.BaseHTTPRequestHandler):
    """A page that knows no service."""

    def do_GET(self):
        page = b"<!doctype html><link rel=icon href=data:,><title>other</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass


class Dashboard(ServiceTest):
    @classmethod
    def setUpClass(cls):
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        # The page is our own. Chromium's sandbox is not for root, and /dev/shm is small in containers.
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1400"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        cls.browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        cls.addClassCleanup(cls.browser.quit)
        cls.browser.set_page_load_timeout(WATCHDOG_S)
        cls.browser.set_script_timeout(WATCHDOG_S)

    def setUp(self):
        super().setUp()
        self.token = secrets.token_hex(32)
        self.token_option = ("--token-file", self.token_file(self.token))
        self.other_sites = []
        self.door = Door()  # Another origin for each test, which has another sessionStorage.
        self.addCleanup(self.door.close)
        self.addCleanup(self.browser.get, "about:blank")  # It ends the page's connections.
        for log in ("browser", "performance"):
            self.browser.get_log(log)  # What is left of the test before.
        self.addCleanup(self.check_logs)

    def command(self, *arguments):
        return super().command("--http", "127.0.0.1:0", *self.token_option, *arguments)

    def serve(self, *arguments, extra=None):
        process = super().serve(*arguments, extra=extra)
        self.door.target = re.search(r"http://([^\s,]+)", self.ready)[1]
        return process

    def check_logs(self):
        """The console has no error but those of requests that failed, and no request went to another host."""
        errors = [entry for entry in self.browser.get_log("browser")
                  if entry["level"] in ("SEVERE", "WARNING") and entry["source"] != "network"]
        self.assertEqual(errors, [])
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        urls = [message["params"]["request"]["url"] for message in messages
                if message["method"] == "Network.requestWillBeSent"]
        own = (self.door.origin + "/", "data:", *self.other_sites)
        self.assertEqual([url for url in urls if not url.startswith(own)], [])
        self.assertEqual([url for url in urls if self.token in url], [])

    # ---- What the page shows ----

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        """What a reader sees of the elements; empty if they are not shown."""
        script = "return [...document.querySelectorAll(arguments[0])].map(node => node.innerText).join('\\n')"
        return self.browser.execute_script(script, selector)

    def is_shown(self, selector):
        return self.browser.execute_script("return document.querySelector(arguments[0])?.checkVisibility()", selector)

    def wait(self, condition, what):
        try:
            WebDriverWait(self.browser, WATCHDOG_S, poll_frequency=0.05).until(lambda _: condition())
        except TimeoutException:
            self.fail(f"{what}; the page shows: {self.text('body')}")

    def wait_for(self, selector, pattern):
        self.wait(lambda: re.search(pattern, self.text(selector)), f"{selector} does not show {pattern!r}")

    def click(self, selector):
        self.wait(lambda: self.find(selector).is_enabled(), f"{selector} cannot be clicked")
        self.find(selector).click()

    def type(self, selector, text):
        self.find(selector).clear()
        self.find(selector).send_keys(text)

    def open(self):
        """Opens the dashboard with the right token."""
        self.browser.get(self.door.origin + "/")
        self.wait(lambda: self.is_shown("#login"), "the page does not ask for the token")
        self.log_in(self.token)
        self.wait(lambda: self.is_shown("#view"), "the page does not show the service")

    def log_in(self, token):
        self.type("#token", token)
        self.click("#login button")

    def pids(self):
        return [runner["pid"] for runner in self.status()["runners"]]

    # ---- Tests ----

    def test_a_wrong_token_is_refused_and_the_right_one_is_kept_by_the_tab(self):
        process = self.serve()
        self.browser.get(self.door.origin + "/")
        self.wait(lambda: self.is_shown("#login"), "the page does not ask for the token")
        self.assertEqual(self.text("#login-error"), "")
        self.log_in("not the token of this service")
        self.wait_for("#login-error", "does not take this token")
        self.assertFalse(self.is_shown("#view"))
        self.log_in(self.token)
        self.wait_for("#service", r"Version\s+\d+\.\d+\.\d+")
        self.browser.refresh()
        self.wait(lambda: self.is_shown("#view"), "the token was not kept")
        self.click("#forget")
        self.wait(lambda: self.is_shown("#login"), "the token was not forgotten")
        self.end(process)

    def test_steps_show_as_they_are_made(self):
        process = self.serve()
        self.assertEqual(self.ask("step", "--count", "2").returncode, DONE)
        self.open()
        self.wait_for("#steps", "^2$")  # Those before the page was opened.
        made = json.loads(self.ask("step", "--json", "--count", "3").stdout)["steps"]
        self.wait_for("#steps", "^5$")
        self.wait_for("#events", r"Steps 1 to 5, loss")
        self.assertAlmostEqual(float(self.text("#loss")), made[-1]["loss"], delta=1e-3 * made[-1]["loss"])
        self.wait_for("#time-chart .legend", r"compute\s+[\d.]+%\s+reduce\s+[\d.]+%\s+wait\s+[\d.]+%")
        for chart in ("loss", "throughput"):
            self.assertEqual(self.browser.execute_script(
                "return document.querySelector(arguments[0]).getAttribute('d').split('L').length",
                f"#{chart}-chart .line:not(.thin)"), 5)
        slots = self.status()["runners"][0]["queue_slots"]
        self.wait_for("#runners", rf"Runner 0\s+ready\s+waiting\s+{slots} of {slots}\s+20\s")
        self.end(process)

    def test_the_team_is_resized_and_a_runner_restarted(self):
        process = self.serve(*THREE)
        self.open()
        self.type("#resize input", "3")
        self.click("#resize button")
        self.wait_for("#ready", "^3of 3 ready$")
        before = self.pids()
        self.click("[aria-label='Restart runner 1']")
        self.wait_for("#result", "^Restarting runner 1: done.$")
        self.wait_for("#events", r"Runner 1 is ready: process \d+")
        after = self.pids()
        self.assertEqual([a == b for a, b in zip(before, after, strict=True)], [True, False, True])
        self.wait_for("#runners", f"pid {after[1]}")
        self.end(process)

    def test_a_checkpoint_needs_a_folder(self):
        process = self.serve()
        self.open()
        self.wait_for("#why-not", "no folder for checkpoints")
        self.assertFalse(self.find("#checkpoint").is_enabled())
        self.end(process)
        process = self.serve("--set", f"checkpoint.directory={self.folder / 'checkpoints'}")
        self.wait_for("#service", "Checkpoints\\s+/")
        self.click("#checkpoint")
        self.wait_for("#result", "^Writing a checkpoint: done.$")
        self.wait_for("#events", re.escape(f"Writing a checkpoint: {self.folder}/checkpoints/"))
        self.end(process)

    def test_a_killed_runner_is_an_event(self):
        process = self.serve()
        self.open()
        pid = self.pids()[1]
        os.kill(pid, signal.SIGKILL)
        self.wait_for("#events", rf"Runner 1 \(pid {pid}\) was lost in phase .*: killed by signal 9 \(KILL\)")
        self.wait_for("#events", r"Runner 1 is ready: process \d+")
        self.wait_for("#losses", "^1 lost so far$")
        self.wait_for("#runners", f"pid {self.pids()[1]}")
        self.end(process)

    def test_what_a_host_is_named_is_text(self):
        process = self.serve()
        self.open()
        with self.attached(HOSTILE):
            self.wait_for("#events", re.escape(f"{HOSTILE} (pid {os.getpid()}) drives the session"))
            self.wait_for("#host", re.escape(HOSTILE))
            self.wait_for("#why-not", "which drives the session")
            self.assertFalse(self.find("#step button").is_enabled())
            self.assertEqual(self.browser.execute_script("return document.images.length"), 0)
        self.end(process)

    def attached(self, name):
        """A connection of this process as a host. It speaks no further."""
        def attach(build):
            connection = socket.socket(socket.AF_UNIX)
            self.addCleanup(connection.close)
            connection.connect(str(self.socket))
            connection.sendall(f"GET /v1/attach HTTP/1.1\r\nHost: localhost\r\nUpgrade: accelmgr-host\r\n"
                               f"Accelmgr-Build: {build}\r\nAccelmgr-Host: {name}\r\n\r\n".encode())
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(4096)
            return connection, answer.decode()
        _, refusal = attach("none")
        connection, answer = attach(re.search("the service of build '([0-9a-f]+)'", refusal)[1])
        self.assertIn(" 101 ", answer)
        return connection

    def test_it_goes_on_after_a_restart_of_the_service(self):
        keep = ["--set", f"checkpoint.directory={self.folder / 'checkpoints'}"]
        process = self.serve(*keep)
        self.assertEqual(self.ask("step", "--count", "3").returncode, DONE)
        self.assertEqual(self.ask("checkpoint").returncode, DONE)
        self.assertEqual(self.ask("step").returncode, DONE)
        self.open()
        self.wait_for("#steps", "^4$")
        process.kill()
        process.wait(WATCHDOG_S)
        self.wait_for("#gone", "The service is gone")
        self.wait_for("#state", "^gone$")
        self.assertFalse(self.find("#step button").is_enabled())
        process = self.serve(*keep, "--set", "checkpoint.resume=latest")
        self.wait(lambda: not self.is_shown("#gone"), "the page does not find the service again")
        self.wait_for("#events", f"Another service answers: process {process.pid}, run [0-9a-f]+, after step 3")
        self.click("#step button")
        self.wait_for("#result", "^Making 1 step: done.$")
        self.wait_for("#steps", "^4$")
        curve = "document.querySelector('#loss-chart .line:not(.thin)').getAttribute('d').split('L').length"
        self.assertEqual(self.browser.execute_script(f"return {curve}"), 4)  # Step 4 is there once.
        self.end(process)

    def test_a_stop_is_confirmed(self):
        process = self.serve()
        self.open()
        self.click("#stop")
        self.wait(lambda: self.is_shown("#stop-dialog"), "nothing asks")
        self.click("#stop-no")
        self.wait(lambda: not self.is_shown("#stop-dialog"), "the question stays")
        self.assertTrue(self.status()["ready"])
        self.click("#stop")
        self.click("#stop-yes")
        self.assertEqual(process.wait(WATCHDOG_S), DONE)
        self.wait_for("#events", "The service ends: a client of --http asked for it")
        self.wait_for("#gone", "The service is gone")

    def test_whoever_reaches_the_unix_socket_needs_no_token(self):
        process = self.serve()
        self.door.target = self.socket
        self.browser.get(self.door.origin + "/")
        self.wait(lambda: self.is_shown("#view"), "the page does not show the service")
        self.assertFalse(self.is_shown("#forget"))
        self.end(process)

    def other_site(self, name):
        """The address of a page of another site, on this machine."""
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherSite)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.other_sites.append(f"http://{name}:{server.server_port}/")
        return self.other_sites[-1]

    def test_a_page_of_another_site_changes_nothing(self):
        process = self.serve()
        self.door.target = self.socket  # Without a token.
        post = """
            const [url, done] = arguments;
            fetch(url + "/v1/step", {method: "POST", mode: "no-cors"}).then(() => done("sent"), () => done("failed"));
        """
        for name in ("127.0.0.1", "localhost"):  # For a browser the same site as the service, and another one.
            self.browser.get(self.other_site(name))
            self.assertEqual(self.browser.execute_async_script(post, self.door.origin), "sent")
            self.browser.execute_script("""
                const form = document.createElement("form");
                [form.method, form.action] = ["POST", arguments[0] + "/v1/step"];
                document.body.append(form);
                form.submit();
            """, self.door.origin)
            self.wait_for("body", "a web page of another site may not change this service")
        self.assertEqual(self.status()["attempts"], 0)
        self.browser.get(self.door.origin + "/")
        self.click("#step button")
        self.wait_for("#result", "^Making 1 step: done.$")
        self.end(process)

    def test_it_fits_a_phone(self):
        process = self.serve()
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True})
        self.addCleanup(self.browser.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
        self.open()
        self.wait_for("#runners", "Runner 1")
        self.assertEqual(self.browser.execute_script("return document.documentElement.scrollWidth"), 360)
        self.end(process)


if __name__ == "__main__":
    serve_cli_test.PROGRAM = sys.argv.pop(1)
    missing = [name for name, found in (("chromium", BROWSER), ("chromedriver", DRIVER), ("selenium", webdriver))
               if not found]
    if missing:
        print(f"skipped: there is no {', no '.join(missing)} (tools/setup --all installs them)")
        sys.exit(SKIPPED)
    unittest.main()
