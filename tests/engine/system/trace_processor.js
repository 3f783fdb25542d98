// Runs the trace processor of Perfetto's web pages in node: trace_processor.js FOLDER, where FOLDER has their
// engine_bundle.js. Requests and replies are those of its RPC protocol, on standard input and output.
const fs = require('fs');
const path = require('path');

const folder = process.argv[2];
const read = (name) => fs.readFileSync(path.join(folder, path.basename(name)));

// The bundle expects to be a web worker, which loads its module by a request that blocks.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = {href: ''};
process.type = 'renderer';
globalThis.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { this.response = new Uint8Array(read(this.url)).buffer; }
};
console.log = console.warn = console.error;  // Standard output has replies only.
(0, eval)(read('engine_bundle.js').toString());

const port = {postMessage: (reply) => fs.writeSync(1, reply)};
self.onmessage({data: port});
const size = Buffer.alloc(4);
// Each request has its size before it. The module is ready after the tasks that are queued now.
setTimeout(() => {
  const readAll = (to) => {
    for (let at = 0; at < to.length;) {
      const count = fs.readSync(0, to, at, to.length - at);
      if (count === 0) return false;
      at += count;
    }
    return true;
  };
  while (readAll(size)) {
    const request = new Uint8Array(size.readUInt32LE());
    readAll(request);
    port.onmessage({data: request});
  }
}, 0);
