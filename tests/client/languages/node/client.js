// Calls a method of GenerationService: node client.js PROTOS ADDRESS METHOD, the request as JSON on stdin.
// Prints one line of JSON for each message, and one for the status.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address, method] = process.argv.slice(2);
const options = { includeDirs: [protos], longs: String, enums: String, oneofs: true };
const { draftwood } = grpc.loadPackageDefinition(loader.loadSync("draftwood/v1/generation.proto", options));
const client = new draftwood.v1.GenerationService(address, grpc.credentials.createInsecure());
const request = JSON.parse(require("fs").readFileSync(0, "utf8"));
const deadline = { deadline: Date.now() + 20000 };
const print = (value) => console.log(JSON.stringify(value));
const status = (error) =>
  print({ code: error?.code ?? 0, details: error?.details ?? "", trailers: Object.keys(error?.metadata?.getMap() ?? {}) });

if (client[method].responseStream) {
  const call = client[method](request, deadline);
  let failed = null;
  call.on("data", print);
  call.on("error", (error) => (failed = error));
  call.on("status", () => setImmediate(() => status(failed)));
} else {
  client[method](request, deadline, (error, response) => {
    if (response) print(response);
    status(error);
  });
}
