/** A scripted server: a list of behaviours, one for each attempt at `Generate`. */

import { EventEmitter, once } from "node:events";
import {
  create,
  type DescMessage,
  type DescMethod,
  type DescService,
  fromBinary,
  type MessageInitShape,
  toBinary,
} from "@bufbuild/protobuf";
import { type Any, AnySchema, anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";
import { HealthImplementation } from "grpc-health-check";
import {
  type GetTenantRequest,
  TenantSchema,
  TenantService,
  type UpdateTenantRequest,
} from "../src/gen/draftwood/admin/v1/tenants_pb.js";
import * as pb from "../src/gen/draftwood/v1/generation_pb.js";
import * as memory from "../src/gen/draftwood/v1/memory_pb.js";
import { MemoryService } from "../src/gen/draftwood/v1/memory_pb.js";
import * as rpc from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";

export type Generating = grpc.ServerWritableStream<pb.GenerateRequest, pb.GenerateResponse>;
/** Answers one attempt. */
export type Behaviour = (call: Generating) => void;

/** Started, a delta for each text, Finished. */
export function answers(...texts: string[]): Behaviour {
  return (call) => {
    writes(call, ...texts);
    call.write(finished(texts.length));
    call.end();
  };
}

/** Started and the texts, then nothing until the client cancels. */
export function hangs(...texts: string[]): Behaviour {
  return (call) => writes(call, ...texts);
}

/** Nothing, not even Started. */
export const silent: Behaviour = () => {};

/** Violates the protocol: ends with OK, but without Finished. */
export const unfinished: Behaviour = (call) => {
  writes(call, "half");
  call.end();
};

export interface Failure {
  code: grpc.status;
  message: string;
  details?: Any[];
  pushback?: string;
  /** Texts that are sent before. */
  after?: string[];
}

export function fails({ code, message, details, pushback, after }: Failure): Behaviour {
  return (call) => {
    if (after) {
      writes(call, ...after);
    }
    const metadata = new grpc.Metadata();
    if (details) {
      const status = create(StatusSchema, { code, message, details });
      metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
    }
    if (pushback !== undefined) {
      metadata.set("grpc-retry-pushback-ms", pushback);
    }
    call.emit("error", { code, details: message, metadata });
  };
}

export const full = (pushback: string) =>
  fails({ code: grpc.status.UNAVAILABLE, message: "the queue is full", details: [reason("QUEUE_FULL")], pushback });

export const reason = (name: string, metadata: Record<string, string> = {}) =>
  detail(rpc.ErrorInfoSchema, { reason: name, domain: "draftwood", metadata });

export const retryIn = (milliseconds: number) =>
  detail(rpc.RetryInfoSchema, { retryDelay: durationFromMs(milliseconds) });

export const violation = (field: string, description: string) =>
  detail(rpc.BadRequestSchema, { fieldViolations: [{ field, description }] });

export const quota = (subject: string, description: string) =>
  detail(rpc.QuotaFailureSchema, { violations: [{ subject, description }] });

function detail<Type extends DescMessage>(type: Type, init: MessageInitShape<Type>): Any {
  const packed = create(AnySchema);
  anyPack(type, create(type, init), packed);
  return packed;
}

function writes(call: Generating, ...texts: string[]): void {
  const { requestId, tenant } = call.request;
  const started = { requestId, tenant: tenant || "default", model: "fake", strategy: "trie", seed: 2n ** 64n - 1n };
  call.write(create(pb.GenerateResponseSchema, { event: { case: "started", value: started } }));
  for (const text of texts) {
    const delta = { text, tokenIds: [text.length] };
    call.write(create(pb.GenerateResponseSchema, { event: { case: "delta", value: delta } }));
  }
}

function finished(tokens: number): pb.GenerateResponse {
  const value = {
    reason: pb.FinishReason.STOP,
    usage: { promptTokens: 3, completionTokens: tokens },
    timings: { queue: durationFromMs(250), decode: { seconds: 1n, nanos: 500_000 } },
    drafting: { strategy: "trie", meanAcceptanceLength: 1.5, steps: 4n, bySource: { trie: { draftTokens: 8n } } },
  };
  return create(pb.GenerateResponseSchema, { event: { case: "finished", value } });
}

const MODEL = {
  model: "fake",
  parameters: 6_000_000n,
  toolFormat: {
    begin: "<tool_call>\n",
    end: "\n</tool_call>",
    between: "\n",
    nameKey: "name",
    argumentsKey: "arguments",
  },
};

export class FakeServer {
  /** Attempt n gets behaviour `script[n]`; attempts beyond the script get its last behaviour. */
  script: Behaviour[] = [answers("It is", " here.")];
  /** What came, one for each attempt at `Generate`. */
  readonly requests: pb.GenerateRequest[] = [];
  /** The headers of each attempt at any method. */
  readonly headers: grpc.MetadataValue[][] = [];
  /** The metadata of the latest attempt at any method. */
  metadata = new grpc.Metadata();
  /** Until its deadline. */
  secondsLeft = Number.NaN;
  /** Emits "request", and "cancelled" when a client cancels a `Generate`. */
  readonly events = new EventEmitter();
  /** So many unary calls are refused first. */
  unavailableCalls = 0;
  readonly #server = new grpc.Server();
  readonly #health = new HealthImplementation({ [pb.GenerationService.typeName]: "SERVING" });
  port = 0;

  static async start(credentials = grpc.ServerCredentials.createInsecure()): Promise<FakeServer> {
    const fake = new FakeServer();
    fake.#health.addToServer(fake.#server);
    fake.#server.addService(definition(pb.GenerationService), {
      generate: (call: Generating) => fake.#generate(call),
      tokenize: unary(fake, (request: pb.TokenizeRequest) => {
        const text = request.input.case === "text" ? request.input.value : "chat";
        return create(pb.TokenizeResponseSchema, { tokenIds: [...Buffer.from(text)], tokens: [...text] });
      }),
      detokenize: unary(fake, (request: pb.DetokenizeRequest) =>
        create(pb.DetokenizeResponseSchema, { text: Buffer.from(request.tokenIds).toString() }),
      ),
      getModelInfo: unary(fake, () => create(pb.GetModelInfoResponseSchema, MODEL)),
    });
    fake.#server.addService(definition(TenantService), {
      getTenant: unary(fake, ({ name }: GetTenantRequest) => create(TenantSchema, { name, etag: "1", weight: 1 })),
      updateTenant: unary(fake, ({ tenant }: UpdateTenantRequest) => tenant ?? create(TenantSchema)),
    });
    fake.#server.addService(definition(MemoryService), {
      warmMemory: (call: grpc.ServerDuplexStream<memory.WarmMemoryRequest, memory.WarmMemoryResponse>) => {
        call.on("data", ({ texts }: memory.WarmMemoryRequest) => {
          call.write(create(memory.WarmMemoryResponseSchema, { texts: BigInt(texts.length) }));
        });
        call.on("end", () => call.end());
      },
      getMemoryStatistics: unary(fake, ({ tenant = "" }: memory.GetMemoryStatisticsRequest) =>
        create(memory.GetMemoryStatisticsResponseSchema, { tenants: [{ tenant, tokens: 16n }] }),
      ),
    });
    fake.port = await new Promise((resolve, reject) => {
      fake.#server.bindAsync("127.0.0.1:0", credentials, (error, port) => (error ? reject(error) : resolve(port)));
    });
    return fake;
  }

  get target(): string {
    return `127.0.0.1:${this.port}`;
  }

  /** What its health service reports. */
  setReady(ready: boolean): void {
    this.#health.setStatus(pb.GenerationService.typeName, ready ? "SERVING" : "NOT_SERVING");
  }

  /** Resolves when a client has cancelled a `Generate`. */
  async cancelled(): Promise<void> {
    await once(this.events, "cancelled");
  }

  stop(): void {
    this.#server.forceShutdown();
  }

  note(call: Generating | grpc.ServerUnaryCall<unknown, unknown>): void {
    const { metadata } = call;
    this.metadata = metadata;
    this.secondsLeft = (Number(call.getDeadline()) - Date.now()) / 1000;
    this.headers.push(metadata.get("authorization"));
  }

  #generate(call: Generating): void {
    this.note(call);
    this.requests.push(call.request);
    call.on("cancelled", () => this.events.emit("cancelled"));
    this.events.emit("request");
    this.script[Math.min(this.requests.length, this.script.length) - 1]?.(call);
  }
}

function unary<Request, Response>(fake: FakeServer, answer: (request: Request) => Response) {
  return (call: grpc.ServerUnaryCall<Request, Response>, respond: grpc.sendUnaryData<Response>) => {
    fake.note(call);
    if (fake.unavailableCalls > 0) {
      fake.unavailableCalls -= 1;
      respond({ code: grpc.status.UNAVAILABLE, details: "the model is loading" });
    } else {
      respond(null, answer(call.request));
    }
  };
}

/** A generated service, as a grpc-js server wants it. */
function definition(service: DescService): grpc.ServiceDefinition {
  return Object.fromEntries(
    service.methods.map((method: DescMethod) => {
      const encode = (type: DescMessage) => (message: object) => Buffer.from(toBinary(type, message as never));
      const decode = (type: DescMessage) => (bytes: Buffer) => fromBinary(type, bytes);
      const definition = {
        path: `/${service.typeName}/${method.name}`,
        requestStream: method.methodKind === "bidi_streaming",
        responseStream: method.methodKind !== "unary",
        requestSerialize: encode(method.input),
        requestDeserialize: decode(method.input),
        responseSerialize: encode(method.output),
        responseDeserialize: decode(method.output),
      };
      return [method.localName, definition];
    }),
  );
}
