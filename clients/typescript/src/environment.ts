/**
 * Settings of clients that the environment has if no option names them: the variables of the Python client and the
 * command line. An empty variable is as good as none.
 */

import { readFileSync } from "node:fs";
import type { TlsConfig } from "./connection.js";
import { ArgumentError } from "./errors.js";

/** The value of a variable; undefined if it is empty or not set. */
export function read(name: string): string | undefined {
  return process.env[name] || undefined;
}

/** DRAFTWOOD_TIMEOUT, which is in seconds, in milliseconds; "inf" is Infinity. */
export function timeoutMs(): number | undefined {
  const text = read("DRAFTWOOD_TIMEOUT");
  if (text === undefined) {
    return undefined;
  }
  const seconds = /^\+?inf(inity)?$/i.test(text) ? Number.POSITIVE_INFINITY : Number(text);
  if (!(seconds > 0)) {
    const allowed = "it must be a number of seconds above 0, or inf";
    throw new ArgumentError("DRAFTWOOD_TIMEOUT", `"${text}" is not allowed; ${allowed}`);
  }
  return seconds * 1000;
}

/** What the variables say about TLS; false if none asks for it. */
export function tls(): TlsConfig | false {
  const rootCertificates = file("DRAFTWOOD_TLS_CA");
  const certificateChain = file("DRAFTWOOD_CLIENT_CERT");
  const privateKey = file("DRAFTWOOD_CLIENT_KEY");
  const serverName = read("DRAFTWOOD_TLS_SERVER_NAME");
  const config = {
    ...(rootCertificates && { rootCertificates }),
    ...(certificateChain && { certificateChain }),
    ...(privateKey && { privateKey }),
    ...(serverName && { serverName }),
  };
  return isOn("DRAFTWOOD_TLS") || Object.keys(config).length > 0 ? config : false;
}

function file(name: string): Buffer | undefined {
  const path = read(name);
  try {
    return path === undefined ? undefined : readFileSync(path);
  } catch (error) {
    throw new ArgumentError(name, `cannot read "${path}": ${error instanceof Error ? error.message : error}`);
  }
}

function isOn(name: string): boolean {
  const text = read(name)?.toLowerCase();
  if (text === undefined || ["0", "false", "no", "off"].includes(text)) {
    return false;
  }
  if (["1", "true", "yes", "on"].includes(text)) {
    return true;
  }
  throw new ArgumentError(name, `"${text}" is not allowed; it must be 1 or 0`);
}
