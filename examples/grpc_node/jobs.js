// Publishes two jobs and works on them, over gRPC:
//
//     holdfast serve data --grpc-port 7701
//     npm install
//     node jobs.js 127.0.0.1:7701 ../../proto
//
// With a token, set HOLDFAST_TOKEN.

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address = "127.0.0.1:7701", folder = "../../proto"] = process.argv.slice(2);
const definition = loader.loadSync("holdfast/v1/holdfast.proto", { includeDirs: [folder], keepCase: true, arrays: true });
const { QueueService } = grpc.loadPackageDefinition(definition).holdfast.v1;
const queues = new QueueService(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.HOLDFAST_TOKEN) metadata.set("authorization", `Bearer ${process.env.HOLDFAST_TOKEN}`);

function publish(queue, texts) {
  const messages = texts.map((text) => ({ text }));
  return new Promise((resolve, reject) =>
    queues.Publish({ queue, messages, create: true }, metadata, (error, answer) =>
      error ? reject(error) : resolve(answer.stored),
    ),
  );
}

function work(queue, count) {
  return new Promise((resolve, reject) => {
    const stream = queues.Subscribe(metadata);
    let number = 0;
    stream.on("data", ({ messages, settled }) => {
      for (const message of messages) {
        console.log(`done: ${message.body}`);
        stream.write({ number: ++number, ack: { receipts: [message.receipt] } });
      }
      if (settled && settled.error) reject(new Error(settled.error.message));
      if (settled && Number(settled.number) === count) stream.cancel();
    });
    stream.on("error", (error) => (error.code === grpc.status.CANCELLED ? resolve() : reject(error)));
    stream.write({ start: { queue, prefetch: 1 } });
  });
}

async function main() {
  const stored = await publish("jobs", ["resize cat.png", "resize dog.png"]);
  console.log(`stored ${stored.map(({ id }) => id).join(", ")}`);
  await work("jobs", stored.length);
  queues.close();
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
