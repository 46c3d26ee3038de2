/** The operators' client: the services of `draftwood.admin.v1`, with the generated types, which are plain objects. */

import {
  create,
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type DescService,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { type CallOptions, Calls } from "./calls.js";
import type { ConnectionOptions } from "./connection.js";
import { AuditService } from "./gen/draftwood/admin/v1/audit_pb.js";
import { ExperimentService } from "./gen/draftwood/admin/v1/experiments_pb.js";
import { StatusService } from "./gen/draftwood/admin/v1/status_pb.js";
import { TenantService } from "./gen/draftwood/admin/v1/tenants_pb.js";
import { NO_RETRY } from "./retry.js";
import { rpc } from "./rpc.js";

type Method<M> =
  M extends DescMethodUnary<infer I, infer O>
    ? (request: MessageInitShape<I>, options?: CallOptions) => Promise<MessageShape<O>>
    : M extends DescMethodServerStreaming<infer I, infer O>
      ? (request: MessageInitShape<I>, options?: CallOptions) => AsyncIterable<MessageShape<O>>
      : never;

/** The methods of a service of the protocol. Requests are plain objects with the fields that they set. */
export type ServiceClient<S extends DescService> = { readonly [Name in keyof S["method"]]: Method<S["method"][Name]> };

/**
 * A connection to a server's administrative services. No call is retried: a change that is sent twice could be made twice.
 *
 *     const admin = new AdminClient("127.0.0.1:50051", { apiKey: "dw_ID_SECRET" });
 *     const acme = await admin.tenants.getTenant({ name: "tenants/acme" });
 *
 * The reference of the protocol lists methods and fields. Every method throws `StatusError`.
 */
export class AdminClient {
  readonly #calls: Calls;
  /** Configuration of tenants. */
  readonly tenants: ServiceClient<typeof TenantService>;
  /** A/B tests of drafting strategies. */
  readonly experiments: ServiceClient<typeof ExperimentService>;
  /** What the losslessness audit found. */
  readonly audit: ServiceClient<typeof AuditService>;
  /** What a server does now, once or as a stream, which has no deadline unless `timeoutMs` sets one. */
  readonly status: ServiceClient<typeof StatusService>;

  /** @throws ArgumentError an argument is invalid. */
  constructor(target?: string, options: ConnectionOptions = {}) {
    this.#calls = new Calls(target, options, NO_RETRY);
    this.tenants = methodsOf(TenantService, this.#calls);
    this.experiments = methodsOf(ExperimentService, this.#calls);
    this.audit = methodsOf(AuditService, this.#calls);
    this.status = methodsOf(StatusService, this.#calls);
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
    const call = (request: MessageInitShape<DescMessage>, options: CallOptions = {}) => {
      const message = create(method.input, request);
      return method.methodKind === "unary"
        ? calls.unary(called, message, options)
        : calls.stream(called, message, options);
    };
    return [method.localName, call];
  });
  return Object.fromEntries(pairs) as ServiceClient<S>;
}
