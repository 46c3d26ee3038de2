import assert from "node:assert/strict";
import { test } from "node:test";
import { unreachable } from "../src/unreachable.js";

const FAILED = "round_robin: No connection established. Last error: No connection established. Last error: ";

/** What @grpc/grpc-js says at the end, whether the client uses TLS, and what this client makes of it. */
const CASES: [string, boolean, string][] = [
  ["Error: connect ECONNREFUSED 127.0.0.1:1. Resolution note: ", true, "nothing listens there; check host and port"],
  ["Error: 80AC:error:SSL routines:wrong version number:a.c:350:\n. Resolution note: ", true, "does not use TLS"],
  ["Failed to connect (2026-11-26T10:48:35.385Z). Resolution note: ", false, "if it requires TLS, set tls (gRPC: Fai"],
  ["Failed to connect (2026-11-26T10:48:35.385Z). Resolution note: ", true, "if it requires a client certificate"],
  ["Error: self-signed certificate. Resolution note: ", true, "an authority that this client does not trust"],
  ["Error: unable to verify the first certificate", true, "an authority that this client does not trust"],
  ["Error: certificate has expired", true, "the server's certificate has expired"],
  ["Error [ERR_TLS_CERT_ALTNAME_INVALID]: Hostname/IP does not match", true, "is for another host; connect to"],
  ["Protocol error (2026-11-26T10:48:35.972Z). Resolution note: ", false, "does not speak gRPC; check the port"],
];

for (const [text, tls, expected] of CASES) {
  test(`why a server is not reached: ${expected}`, () => {
    const said = unreachable("localhost:1", tls, FAILED + text);
    assert.ok(said.startsWith("cannot connect to localhost:1: "), said);
    assert.ok(said.includes(expected), said);
    assert.doesNotMatch(said, /\n|Last error|Resolution note|: \)$/);
  });
}

test("other reasons are gRPC's own words, in one line", () => {
  assert.equal(unreachable("h:1", false, `${FAILED}Error: no\nroute`), "cannot connect to h:1 (no route)");
  assert.equal(unreachable("h:1", false, "the model is loading"), "h:1: the model is loading");
  assert.equal(unreachable("h:1", false, ""), "h:1: UNAVAILABLE");
  const unknown = unreachable("h:1", false, "Name resolution failed for target dns:h:1");
  assert.match(unknown, /^cannot connect to h:1: the host's name cannot be resolved; check it \(gRPC: Name/);
});
