/** Why a server was not reached, and what to try, from what @grpc/grpc-js says of it. */

const PLAINTEXT = "what listens there does not use TLS; leave out TLS, or check the port";
const UNTRUSTED =
  "the server's certificate is of an authority that this client does not trust; give the authority's PEM file as " +
  "tls.rootCertificates";
const CLOSED = "the server closed the connection; if it requires TLS, set tls";
const CLOSED_TLS =
  "the server closed the connection; if it requires a client certificate, give one that it trusts as " +
  "tls.certificateChain and tls.privateKey";

/** By a part of the text of @grpc/grpc-js 1.14 and of Node; the first that fits. */
const CAUSES: readonly (readonly [RegExp, string])[] = [
  [/ECONNREFUSED/, "nothing listens there; check host and port, and that the server runs"],
  [/Name resolution failed|ENOTFOUND/, "the host's name cannot be resolved; check it"],
  [/wrong version number/i, PLAINTEXT],
  [/certificate has expired|CERT_HAS_EXPIRED/, "the server's certificate has expired"],
  [
    /ALTNAME_INVALID/,
    "the server's certificate is for another host; connect to that host, or name it as tls.serverName",
  ],
  [/self[- ]signed certificate|unable to (?:verify|get) .*certificate/, UNTRUSTED],
  [/Protocol error/, "what listens there does not speak gRPC; check the port"],
];

/**
 * What happened, what to try, and gRPC's own words, in one line.
 *
 * @param tls whether the client uses TLS.
 * @param text details of gRPC's error, whose status is UNAVAILABLE.
 */
export function unreachable(target: string, tls: boolean, text: string): string {
  const line = text.replace(/\s+/g, " ");
  const last = /.*Last error: (?:Error: )?(.*?)(?:\. ?Resolution note:.*)?$/.exec(line)?.[1];
  const reason = (last ?? line).replace(/[\s:]+$/, "");
  let cause = CAUSES.find(([part]) => part.test(reason))?.[1];
  if (cause === undefined && last !== undefined && /^(?:Failed to connect|Connection dropped)/.test(last)) {
    cause = tls ? CLOSED_TLS : CLOSED;
  }
  if (cause !== undefined) {
    return `cannot connect to ${target}: ${cause} (gRPC: ${reason})`;
  }
  return last === undefined ? `${target}: ${line || "UNAVAILABLE"}` : `cannot connect to ${target} (${reason})`;
}
