/** Addresses of servers, in gRPC's syntax: "host:port", "dns:///host:port", "ipv4:…", "unix:…". */

import { BlockList, isIPv6 } from "node:net";
import { ArgumentError } from "./errors.js";
import { kind } from "./request.js";

export const DEFAULT_TARGET = "127.0.0.1:50051";

const HOST_AND_PORT = /^(?:\[([^[\]]+)\]|([^[\]:]+)):(\d+)$/;

/**
 * Checks that a target names a server, with the port if its scheme has ports: gRPC itself would take 443 without one.
 *
 * @throws ArgumentError it does not.
 */
export function checkTarget(target: string): void {
  if (typeof target !== "string") {
    throw new ArgumentError("target", `must be a string, not ${kind(target)}`);
  }
  if (target === "") {
    throw new ArgumentError("target", `is empty; it must name a server, such as "${DEFAULT_TARGET}"`);
  }
  for (const address of addresses(target)) {
    if (address.includes("://")) {
      throw new ArgumentError("target", `"${target}" is a URL; write it as host:port, and use TLS for https`);
    }
    const port = Number(HOST_AND_PORT.exec(address)?.[3] ?? 0);
    if (port < 1 || port > 65535) {
      const example = 'such as "localhost:50051" or "[::1]:50051"';
      throw new ArgumentError("target", `"${target}" has no valid port; write it as host:port, ${example}`);
    }
  }
}

/** Whether a target is on this machine for certain. */
export function isLocal(target: string): boolean {
  if (/^dns:\/\/[^/]/.test(target)) {
    return false; // the name server on another machine says where it is
  }
  const found = addresses(target);
  return target.startsWith("unix:") || (found.length > 0 && found.every(isLoopback));
}

/** Every "host:port" of a target; empty if its scheme has no ports. */
function addresses(target: string): string[] {
  const [, scheme, rest = ""] = /^(unix|xds|ipv4|ipv6|dns):(.*)$/s.exec(target) ?? [];
  if (scheme === undefined) {
    return [target];
  }
  if (scheme === "dns") {
    return [rest.replace(/^\/\/[^/]*\//, "")];
  }
  return scheme.startsWith("ipv") ? rest.split(",") : [];
}

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8, "ipv4");
LOOPBACK.addAddress("::1", "ipv6");

function isLoopback(address: string): boolean {
  const [, bracketed, plain] = HOST_AND_PORT.exec(address) ?? [];
  const host = bracketed ?? plain ?? "";
  return host === "localhost" || LOOPBACK.check(host, isIPv6(host) ? "ipv6" : "ipv4");
}
