/** How a client reaches a server: target, TLS, credentials, deadline, channel options. */

import { createRequire } from "node:module";
import { BlockList, isIPv6 } from "node:net";
import { type ChannelCredentials, type ChannelOptions, credentials, Metadata } from "@grpc/grpc-js";
import { ArgumentError } from "./errors.js";
import { GenerationService } from "./gen/draftwood/v1/generation_pb.js";
import { HEALTHY_ROUND_ROBIN } from "./health.js";
import { kind, timeLimit } from "./request.js";
import { methodConfig, type RetryPolicy } from "./retry.js";

export const DEFAULT_TARGET = "127.0.0.1:50051";

/** The client's version. */
export const VERSION: string = createRequire(import.meta.url)("../package.json").version;

const MAX_MESSAGE_BYTES = 16 * 2 ** 20;
const AUTHORIZATION = "authorization";

/** TLS settings; certificates and keys are PEM. */
export interface TlsConfig {
  /** Trusted authorities; Node's own public ones by default. */
  readonly rootCertificates?: Buffer;
  /** The client certificate, for servers that require one, with its key. */
  readonly certificateChain?: Buffer;
  readonly privateKey?: Buffer;
  /** The name on the server's certificate, if it differs from the host of the target. */
  readonly serverName?: string;
}

/** Options of a client. */
export interface ClientOptions {
  /** The default of requests; without one, that of the credential, or "default". */
  readonly tenant?: string;
  /** The default deadline of requests in milliseconds, retries included; none by default. */
  readonly timeoutMs?: number;
  /** When a request is sent again; `NO_RETRY` switches retries off. */
  readonly retry?: RetryPolicy;
  /** True for public authorities, or a `TlsConfig`. */
  readonly tls?: boolean | TlsConfig;
  /** A key of the server, sent as "authorization: Bearer ...". */
  readonly apiKey?: string;
  /** A token (JWT) instead, or a function that is called for each request. */
  readonly token?: string | (() => string | Promise<string>);
  /** Allows to send them without `tls` to another machine. */
  readonly plaintextCredentials?: boolean;
  /** Headers of each request; names are lower-cased. */
  readonly metadata?: Readonly<Record<string, string>>;
  /** gRPC channel options; they override the client's own. */
  readonly channelOptions?: ChannelOptions;
}

/** The checked arguments of `Client`. */
export class Connection {
  readonly target: string;
  readonly tenant: string | undefined;
  readonly timeoutMs: number | undefined;
  readonly channelCredentials: ChannelCredentials;
  readonly channelOptions: ChannelOptions;
  readonly #token: ClientOptions["token"];
  readonly #headers: readonly [string, string][];

  /** @throws ArgumentError an argument is invalid. */
  constructor(target: string, options: ClientOptions) {
    if (typeof target !== "string") {
      throw new ArgumentError("target", `must be a string, not ${kind(target)}`);
    }
    if (target === "") {
      throw new ArgumentError("target", `is empty; it must name a server, such as "${DEFAULT_TARGET}"`);
    }
    const { apiKey, token, tls = false } = options;
    this.target = target;
    this.tenant = options.tenant;
    this.timeoutMs = timeLimit("timeoutMs", options.timeoutMs);
    this.#headers = Object.entries(options.metadata ?? {}).map(([name, value]) => [name.toLowerCase(), value]);
    this.#token = apiKey ?? token;
    checkCredentials(target, options, new Map(this.#headers).get(AUTHORIZATION));
    const config: TlsConfig | undefined = tls === true ? {} : tls || undefined;
    this.channelCredentials = config ? secure(config) : credentials.createInsecure();
    this.channelOptions = {
      ...CHANNEL_OPTIONS,
      "grpc.service_config": JSON.stringify(serviceConfig(target, options.retry ?? {})),
      ...(config?.serverName ? { "grpc.ssl_target_name_override": config.serverName } : {}),
      ...options.channelOptions,
    };
  }

  /**
   * The metadata of one request; a `token` that is a function is called for each.
   *
   * @throws ArgumentError the function returned what no header can have.
   */
  async metadata(): Promise<Metadata> {
    const metadata = new Metadata();
    for (const [name, value] of this.#headers) {
      metadata.set(name, value);
    }
    if (this.#token !== undefined) {
      const token = typeof this.#token === "function" ? await this.#token() : this.#token;
      metadata.set(AUTHORIZATION, bearer("token", token));
    }
    return metadata;
  }
}

const CHANNEL_OPTIONS: ChannelOptions = {
  "grpc.primary_user_agent": `draftwood-typescript/${VERSION}`,
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
  // gRPC retries a request only if it fits into this buffer; by default, 1 MiB.
  "grpc.per_rpc_retry_buffer_size": MAX_MESSAGE_BYTES,
  // A silently broken connection is detected within 40 s while a request is under way. Servers accept a ping every 10 s.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  // The client reconnects to a restarted server within about 2 s.
  "grpc.initial_reconnect_backoff_ms": 200,
  "grpc.max_reconnect_backoff_ms": 2_000,
  // Else every name is looked up a second time, for a service config in a TXT record.
  "grpc.service_config_disable_resolution": 1,
};

/** Requests go to servers that report SERVING. A plain "host:port" is one server, whose own answer tells more. */
const OF_SEVERAL_SERVERS = /^(?:dns|ipv4|ipv6):/;

function serviceConfig(target: string, retry: RetryPolicy): object {
  const balancing = OF_SEVERAL_SERVERS.test(target)
    ? { [HEALTHY_ROUND_ROBIN]: { service: GenerationService.typeName } }
    : { round_robin: {} };
  return { loadBalancingConfig: [balancing], methodConfig: methodConfig(retry) };
}

function checkCredentials(target: string, options: ClientOptions, header: string | undefined): void {
  const { apiKey, token, tls, plaintextCredentials } = options;
  const given = Object.entries({ apiKey, token, metadata: header }).filter(([, value]) => value !== undefined);
  const names = given.map(([name]) => name);
  if (names[1]) {
    throw new ArgumentError(names[1], `cannot be combined with ${names[0]}: a request has one credential`);
  }
  if (names[0] && !tls && !plaintextCredentials && !isLocal(target)) {
    const problem = `would be sent to ${target} in clear text; use TLS, or allow it with plaintextCredentials`;
    throw new ArgumentError(names[0], problem);
  }
  for (const [name, value] of Object.entries({ apiKey, token })) {
    if (value !== undefined && typeof value !== "function") {
      bearer(name, value);
    }
  }
}

/** The header's value. */
function bearer(name: string, token: string): string {
  if (typeof token !== "string" || !/^[!-~]+$/.test(token)) {
    throw new ArgumentError(name, "is empty, or has spaces, line ends or letters beyond ASCII");
  }
  return `Bearer ${token}`;
}

function secure(tls: TlsConfig): ChannelCredentials {
  const { rootCertificates, certificateChain, privateKey } = tls;
  if ((certificateChain === undefined) !== (privateKey === undefined)) {
    throw new ArgumentError("tls", "certificateChain and privateKey must be given together");
  }
  try {
    return credentials.createSsl(rootCertificates, privateKey, certificateChain);
  } catch (error) {
    throw new ArgumentError("tls", error instanceof Error ? error.message : String(error));
  }
}

/** Whether a target, as gRPC reads it, is on this machine for certain. */
function isLocal(target: string): boolean {
  const [, scheme, rest = ""] = /^(unix|ipv4|ipv6):(.*)$/s.exec(target) ?? [];
  if (scheme === "unix") {
    return true;
  }
  return scheme ? rest.split(",").every(isLoopback) : isLoopback(target.replace(/^dns:(?:\/\/\/)?/, ""));
}

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8, "ipv4");
LOOPBACK.addAddress("::1", "ipv6");

/** Whether "host:port", "[host]:port" or "host" is this machine. */
function isLoopback(address: string): boolean {
  const host = /^\[([^[\]]*)\](?::\d+)?$/.exec(address)?.[1] ?? /^([^:]*):[^:]*$/.exec(address)?.[1] ?? address;
  return host === "localhost" || LOOPBACK.check(host, isIPv6(host) ? "ipv6" : "ipv4");
}
