/** The operators' client: MemoryService and `draftwood.admin.v1`, with the generated types, which are plain objects. */

import { setImmediate } from "node:timers/promises";
import {
  create,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type DescService,
  type Message,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { type CallOptions, Calls } from "./calls.js";
import type { ConnectionOptions } from "./connection.js";
import { AuditService } from "./gen/draftwood/admin/v1/audit_pb.js";
import { ExperimentService } from "./gen/draftwood/admin/v1/experiments_pb.js";
import { StatusService } from "./gen/draftwood/admin/v1/status_pb.js";
import { TenantService } from "./gen/draftwood/admin/v1/tenants_pb.js";
import { MemoryService } from "./gen/draftwood/v1/memory_pb.js";
import { NO_RETRY } from "./retry.js";
import { rpc } from "./rpc.js";

type Method<M> =
  M extends DescMethodUnary<infer I, infer O>
    ? (request: MessageInitShape<I>, options?: CallOptions) => Promise<MessageShape<O>>
    : M extends DescMethodServerStreaming<infer I, infer O>
      ? (request: MessageInitShape<I>, options?: CallOptions) => AsyncIterable<MessageShape<O>>
      : M extends DescMethodBiDiStreaming<infer I, infer O>
        ? (requests: Requests<MessageInitShape<I>>, options?: CallOptions) => AsyncIterable<MessageShape<O>>
        : never;

/** The messages of a stream of requests, which is read as fast as the server takes them. */
export type Requests<Request> = Iterable<Request> | AsyncIterable<Request>;

/** The methods of a service of the protocol. Requests are plain objects with the fields that they set. */
export type ServiceClient<S extends DescService> = { readonly [Name in keyof S["method"]]: Method<S["method"][Name]> };

/**
 * A connection to a server's administrative services. No call is retried: a change that is sent twice could be made twice.
 *
 *     const admin = new AdminClient("127.0.0.1:50051", { apiKey: "dw_ID_SECRET" });
 *     const acme = await admin.tenants.getTenant({ name: "tenants/acme" });
 *
 * The reference of the protocol lists methods and fields. Every method throws `StatusError`. Streams have no deadline unless
 * `timeoutMs` sets one.
 */
export class AdminClient {
  readonly #calls: Calls;
  /** Configuration of tenants. */
  readonly tenants: ServiceClient<typeof TenantService>;
  /** A/B tests of drafting strategies. */
  readonly experiments: ServiceClient<typeof ExperimentService>;
  /** What the losslessness audit found. */
  readonly audit: ServiceClient<typeof AuditService>;
  /** What a server does now, once or as a stream. */
  readonly status: ServiceClient<typeof StatusService>;
  /** Tenants' learned memories: statistics, warm-up, export, import, purge. An empty tenant is that of the credential. */
  readonly memory: ServiceClient<typeof MemoryService>;

  /** @throws ArgumentError an argument is invalid. */
  constructor(target?: string, options: ConnectionOptions = {}) {
    this.#calls = new Calls(target, options, NO_RETRY);
    this.tenants = methodsOf(TenantService, this.#calls);
    this.experiments = methodsOf(ExperimentService, this.#calls);
    this.audit = methodsOf(AuditService, this.#calls);
    this.status = methodsOf(StatusService, this.#calls);
    this.memory = methodsOf(MemoryService, this.#calls);
  }

  /** Cancels calls under way and closes the connection. May be called twice. */
  close(): void {
    this.#calls.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

function methodsOf<S extends DescService>(service: S, calls: Calls): ServiceClient<S> {
  const pairs = service.methods.map((method) => {
    const called = rpc(method);
    const message = (request: Init) => create(method.input, request);
    switch (method.methodKind) {
      case "unary":
        return [method.localName, (one: Init, options: CallOptions = {}) => calls.unary(called, message(one), options)];
      case "server_streaming":
        return [
          method.localName,
          (one: Init, options: CallOptions = {}) => calls.stream(called, message(one), options),
        ];
      default: {
        const call = (all: Requests<Init>, options: CallOptions = {}) =>
          calls.exchange(called, messagesOf(all, message), options);
        return [method.localName, call];
      }
    }
  });
  return Object.fromEntries(pairs) as ServiceClient<S>;
}

type Init = MessageInitShape<DescMessage>;

async function* messagesOf(requests: Requests<Init>, message: (request: Init) => Message): AsyncGenerator<Message> {
  for await (const request of requests) {
    yield message(request);
    await setImmediate(); // lets responses in: before the first one, gRPC takes all messages at once
  }
}
