/** How a client reaches a server: target, TLS, credentials, deadline, channel options. */

import { type ChannelCredentials, type ChannelOptions, credentials, Metadata } from "@grpc/grpc-js";
import * as environment from "./environment.js";
import { ArgumentError } from "./errors.js";
import { GenerationService } from "./gen/draftwood/v1/generation_pb.js";
import { HEALTHY_ROUND_ROBIN } from "./health.js";
import { timeLimit } from "./request.js";
import { methodConfig, type RetryPolicy } from "./retry.js";
import { checkTarget, DEFAULT_TARGET, isLocal } from "./target.js";
import { VERSION } from "./version.js";

/** Of a request that nobody set another deadline for; a server's own default is as long. */
const DEFAULT_TIMEOUT_MS = 600_000;
const MAX_MESSAGE_BYTES = 16 * 2 ** 20;
const AUTHORIZATION = "authorization";
const CREDENTIAL_VARIABLES = ["DRAFTWOOD_API_KEY", "DRAFTWOOD_TOKEN"];

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

/**
 * Options of a connection. What no option names is taken from the environment: DRAFTWOOD_TIMEOUT (seconds),
 * DRAFTWOOD_API_KEY or DRAFTWOOD_TOKEN, DRAFTWOOD_TLS (1 for public authorities), DRAFTWOOD_TLS_CA,
 * DRAFTWOOD_TLS_SERVER_NAME, DRAFTWOOD_CLIENT_CERT and DRAFTWOOD_CLIENT_KEY, which are PEM files.
 */
export interface ConnectionOptions {
  /** The default deadline of requests in milliseconds, retries included; 600,000 by default, Infinity for none. */
  readonly timeoutMs?: number;
  /** True for public authorities, or a `TlsConfig`; false for none whatever the environment says. */
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

/** Options of a `Client`. */
export interface ClientOptions extends ConnectionOptions {
  /** The default of requests; DRAFTWOOD_TENANT, or without one that of the credential, or "default". */
  readonly tenant?: string;
  /** When a request is sent again; `NO_RETRY` switches retries off. */
  readonly retry?: RetryPolicy;
}

/** The checked arguments of a client. */
export class Connection {
  readonly target: string;
  readonly usesTls: boolean;
  readonly timeoutMs: number | undefined;
  readonly channelCredentials: ChannelCredentials;
  readonly channelOptions: ChannelOptions;
  readonly #token: ConnectionOptions["token"];
  readonly #headers: readonly [string, string][];

  /** @throws ArgumentError an argument is invalid. */
  constructor(
    target: string = environment.read("DRAFTWOOD_TARGET") ?? DEFAULT_TARGET,
    options: ConnectionOptions = {},
    retry: RetryPolicy = {},
  ) {
    checkTarget(target);
    const { tls = environment.tls(), plaintextCredentials = false } = options;
    this.target = target;
    this.timeoutMs = timeLimit("timeoutMs", options.timeoutMs ?? environment.timeoutMs() ?? DEFAULT_TIMEOUT_MS);
    this.#headers = headersOf(options.metadata);
    const credential = credentialOf(options, new Map(this.#headers).get(AUTHORIZATION));
    if (credential && !tls && !plaintextCredentials && !isLocal(target)) {
      const problem = `would be sent to ${target} in clear text; use TLS, or allow it with plaintextCredentials`;
      throw new ArgumentError(credential.source, problem);
    }
    this.#token = credential?.token;
    const config: TlsConfig | undefined = tls === true ? {} : tls || undefined;
    this.usesTls = config !== undefined;
    this.channelCredentials = config ? secure(config) : credentials.createInsecure();
    this.channelOptions = {
      ...CHANNEL_OPTIONS,
      "grpc.service_config": JSON.stringify(serviceConfig(target, retry)),
      ...(config?.serverName ? { "grpc.ssl_target_name_override": config.serverName } : {}),
      ...options.channelOptions,
    };
  }

  /**
   * The metadata of one request; a `token` that is a function is called for each.
   *
   * @param own headers of this request alone; they replace those of the client.
   * @throws ArgumentError the function returned what no header can have.
   */
  async metadata(own?: Readonly<Record<string, string>>): Promise<Metadata> {
    const metadata = new Metadata();
    const headers = new Map([...this.#headers, ...headersOf(own)]);
    for (const [name, value] of headers) {
      metadata.set(name, value);
    }
    if (this.#token !== undefined && !headersOf(own).some(([name]) => name === AUTHORIZATION)) {
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

function headersOf(metadata: Readonly<Record<string, string>> = {}): [string, string][] {
  return Object.entries(metadata).map(([name, value]) => [name.toLowerCase(), value]);
}

/** The one credential that the options or else the environment have, and where it comes from; a header has no token. */
function credentialOf(
  { apiKey, token }: ConnectionOptions,
  header: string | undefined,
): { source: string; token?: NonNullable<ConnectionOptions["token"]> } | undefined {
  const set = (values: Record<string, ConnectionOptions["token"]>) =>
    Object.entries(values).filter(([, value]) => value !== undefined);
  let given = set({ apiKey, token, metadata: header });
  if (given.length === 0) {
    given = set(Object.fromEntries(CREDENTIAL_VARIABLES.map((name) => [name, environment.read(name)])));
  }
  const [one, other] = given;
  if (one && other) {
    throw new ArgumentError(other[0], `cannot be combined with ${one[0]}: a request has one credential`);
  }
  if (!one || one[0] === "metadata") {
    return one && { source: one[0] };
  }
  const [source, value = ""] = one;
  if (typeof value !== "function") {
    bearer(source, value);
  }
  return { source, token: value };
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
