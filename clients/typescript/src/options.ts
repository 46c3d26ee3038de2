/** Options of clients and requests, their defaults in the environment, and the checks of both. */

import { readFileSync } from "node:fs";
import { isIPv4 } from "node:net";
import { createSecureContext } from "node:tls";
import { ArgumentError } from "./errors.js";

/** The client's version, as in package.json. */
export const VERSION = "0.2.0";
const DEFAULT_TARGET = "127.0.0.1:50051";
/** Of a request that nobody set another deadline for; a server's own default is as long. */
const DEFAULT_TIMEOUT_MS = 600_000;
/** gRPC writes a deadline in eight digits. */
const MAX_TIMEOUT_MS = 99_999_999;
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
  /** A token (JWT) instead, or a function that is called for each attempt at a request. */
  readonly token?: string | (() => string | Promise<string>);
  /** Allows to send them without `tls` to another machine. */
  readonly plaintextCredentials?: boolean;
  /** Headers of each request. */
  readonly metadata?: Readonly<Record<string, string>>;
}

/** Options of a `Client`. */
export interface ClientOptions extends ConnectionOptions {
  /** The default of requests; DRAFTWOOD_TENANT, or without one that of the credential, or "default". */
  readonly tenant?: string;
  /**
   * Attempts at a request, the first one included: 1 to 5, by default 4; 1 switches retries off. A request that failed with
   * UNAVAILABLE, or that the server ended with CANCELLED while it closed the connection, is sent again after the delay that
   * the server asks for, unless that is past the deadline or the server forbids it. A stream is only retried before its first event.
   */
  readonly maxAttempts?: number;
}

/** Options of any request. */
export interface CallOptions {
  /** Milliseconds for the whole answer, retries included; the client's by default, Infinity for no deadline. */
  readonly timeoutMs?: number | undefined;
  /** Cancels the request when it is aborted. */
  readonly signal?: AbortSignal | undefined;
  /** Headers of this request alone, which replace those of the client. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
}

/** Options, or else the environment. @throws ArgumentError an option or a variable is invalid. */
export function settingsOf(target = variable("DRAFTWOOD_TARGET") ?? DEFAULT_TARGET, options: ClientOptions) {
  const host = hostOf(target);
  const { tls = tlsVariables(), plaintextCredentials, token, maxAttempts = 4 } = options;
  const headers = headersOf(options.metadata);
  const [source, credential] = credentialOf(options, headers.get(AUTHORIZATION) ?? undefined);
  if (source && !tls && !plaintextCredentials && !isLoopback(host)) {
    const problem = `would be sent to ${target} in clear text; use TLS, or allow it with plaintextCredentials`;
    throw new ArgumentError(source, problem);
  }
  if (source && source !== "metadata" && typeof credential !== "function") {
    headers.set(AUTHORIZATION, bearer(source, credential));
  }
  headers.set("user-agent", `draftwood-typescript/${VERSION}`);
  if (!(maxAttempts >= 1 && maxAttempts <= 5)) {
    throw new ArgumentError("maxAttempts", `${maxAttempts} is not allowed; it must be 1 to 5`);
  }
  return {
    target,
    timeoutMs: timeLimit(options.timeoutMs ?? timeoutVariable()),
    /** Of Node's TLS; undefined without TLS. */
    tls: tls ? secureOptions(tls === true ? {} : tls) : undefined,
    /** Of each request, with the credential unless `token` writes it. */
    headers,
    token: typeof token === "function" ? token : undefined,
    maxAttempts,
  };
}

type Settings = ReturnType<typeof settingsOf>;

/** The headers of one attempt. @throws ArgumentError `token` or `metadata` has what no header can have. */
export async function requestHeaders(settings: Settings, metadata: CallOptions["metadata"]): Promise<Headers> {
  const headers = new Headers(settings.headers);
  const ofRequest = headersOf(metadata);
  if (settings.token && !ofRequest.has(AUTHORIZATION)) {
    headers.set(AUTHORIZATION, bearer("token", await settings.token()));
  }
  for (const [name, value] of ofRequest) headers.set(name, value);
  return headers;
}

/** A time limit in milliseconds; Infinity, as undefined, for none. @throws ArgumentError it is not allowed. */
export function timeLimit(value: number = Number.POSITIVE_INFINITY): number {
  if (!(typeof value === "number" && value > 0 && (value <= MAX_TIMEOUT_MS || value === Number.POSITIVE_INFINITY))) {
    const allowed = `it must be above 0 and at most ${MAX_TIMEOUT_MS} milliseconds, or Infinity`;
    throw new ArgumentError("timeoutMs", `${String(value)} is not allowed; ${allowed}`);
  }
  return value;
}

/** The value of an environment variable; undefined if it is empty or not set. */
export function variable(name: string): string | undefined {
  return process.env[name] || undefined;
}

/** DRAFTWOOD_TIMEOUT, which is in seconds, or the default in milliseconds; "inf" is Infinity. */
function timeoutVariable(): number {
  const text = variable("DRAFTWOOD_TIMEOUT") ?? String(DEFAULT_TIMEOUT_MS / 1000);
  const seconds = /^\+?inf(inity)?$/i.test(text) ? Number.POSITIVE_INFINITY : Number(text);
  if (!(seconds > 0)) {
    const allowed = "it must be a number of seconds above 0, or inf";
    throw new ArgumentError("DRAFTWOOD_TIMEOUT", `"${text}" is not allowed; ${allowed}`);
  }
  return seconds * 1000;
}

/** What the environment says about TLS; false if no variable asks for it. */
function tlsVariables(): TlsConfig | false {
  const serverName = variable("DRAFTWOOD_TLS_SERVER_NAME");
  const config = {
    ...fileVariable("DRAFTWOOD_TLS_CA", "rootCertificates"),
    ...fileVariable("DRAFTWOOD_CLIENT_CERT", "certificateChain"),
    ...fileVariable("DRAFTWOOD_CLIENT_KEY", "privateKey"),
    ...(serverName && { serverName }),
  };
  const asked = variable("DRAFTWOOD_TLS")?.toLowerCase() ?? "0";
  if (!["0", "false", "no", "off", "1", "true", "yes", "on"].includes(asked)) {
    throw new ArgumentError("DRAFTWOOD_TLS", `"${asked}" is not allowed; it must be 1 or 0`);
  }
  return ["1", "true", "yes", "on"].includes(asked) || Object.keys(config).length > 0 ? config : false;
}

function fileVariable(name: string, field: keyof TlsConfig): TlsConfig {
  const path = variable(name);
  try {
    return path === undefined ? {} : { [field]: readFileSync(path) };
  } catch (error) {
    throw new ArgumentError(name, `cannot read "${path}": ${error instanceof Error ? error.message : error}`);
  }
}

/** The host of a target, which must have a port too. */
function hostOf(target: string): string {
  if (target.includes("://")) {
    throw new ArgumentError("target", `"${target}" is a URL; write it as host:port, and use TLS for https`);
  }
  const [, bracketed, plain, port] = /^(?:\[([^[\]]+)\]|([^[\]:/@?#\s]+)):(\d+)$/.exec(target) ?? [];
  if (!(Number(port) >= 1 && Number(port) <= 65535)) {
    const example = 'such as "localhost:50051" or "[::1]:50051"';
    throw new ArgumentError("target", `"${target}" has no valid port; write it as host:port, ${example}`);
  }
  return bracketed ?? plain ?? "";
}

function isLoopback(host: string): boolean {
  return host === "localhost" || host === "::1" || (isIPv4(host) && host.startsWith("127."));
}

function headersOf(metadata: CallOptions["metadata"]): Headers {
  try {
    return new Headers(metadata);
  } catch {
    throw new ArgumentError("metadata", "a name or a value is not allowed in HTTP"); // which may be secret
  }
}

/** The only credential of the options, or else of the environment: the name of its option or variable, and itself. */
function credentialOf({ apiKey, token }: ConnectionOptions, metadata: string | undefined): [source?: string, unknown?] {
  const given = (sources: object) => Object.entries(sources).filter(([, value]) => value !== undefined);
  const options = given({ apiKey, token, metadata });
  const names = ["DRAFTWOOD_API_KEY", "DRAFTWOOD_TOKEN"];
  const variables = given(Object.fromEntries(names.map((name) => [name, variable(name)])));
  const [first, second] = options.length > 0 ? options : variables;
  if (first && second) {
    throw new ArgumentError(second[0], `cannot be combined with ${first[0]}: a request has one credential`);
  }
  return first ?? [];
}

/** The header of a token. */
function bearer(source: string, token: unknown): string {
  if (typeof token !== "string" || !/^[!-~]+$/.test(token)) {
    throw new ArgumentError(source, "is empty, or has spaces, line ends or letters beyond ASCII");
  }
  return `Bearer ${token}`;
}

function secureOptions({ rootCertificates, certificateChain, privateKey, serverName }: TlsConfig) {
  if ((certificateChain === undefined) !== (privateKey === undefined)) {
    throw new ArgumentError("tls", "certificateChain and privateKey must be given together");
  }
  const options = { ca: rootCertificates, cert: certificateChain, key: privateKey, servername: serverName };
  try {
    createSecureContext(options);
  } catch (error) {
    throw new ArgumentError("tls", error instanceof Error ? error.message : String(error));
  }
  return options;
}
