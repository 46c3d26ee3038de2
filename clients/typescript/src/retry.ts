/** When a request is sent again, by gRPC itself (gRFC A6). */

import { ArgumentError } from "./errors.js";

/**
 * How often and how soon a request that failed with UNAVAILABLE is sent again.
 *
 * If the server sent a delay (`grpc-retry-pushback-ms`), the next attempt comes after it, or never if it is negative.
 * Otherwise it comes after about min(maxBackoffMs, initialBackoffMs * multiplier ** (n - 1)) milliseconds, n being the
 * number of attempts so far; gRPC draws it at random. A stream is only retried before its first event, and nothing past
 * the request's deadline.
 */
export interface RetryPolicy {
  /** Attempts, the first one included, at most 5; 0 and 1 both mean no retry. 4 by default. */
  readonly maxAttempts?: number;
  /** Milliseconds, at least 10; 100 by default. */
  readonly initialBackoffMs?: number;
  /** Milliseconds, at least 10; 5,000 by default. */
  readonly maxBackoffMs?: number;
  /** At least 1; 2 by default. */
  readonly multiplier?: number;
}

/** Switches retries off. */
export const NO_RETRY: RetryPolicy = Object.freeze({ maxAttempts: 1 });

const DEFAULTS: Required<RetryPolicy> = { maxAttempts: 4, initialBackoffMs: 100, maxBackoffMs: 5000, multiplier: 2 };
/** gRPC makes no more attempts, whatever a policy says. */
const MAX_ATTEMPTS = 5;
const MIN_MS = 10;

/**
 * The part `methodConfig` of a gRPC service config.
 *
 * @throws ArgumentError a value is outside its range.
 */
export function methodConfig(policy: RetryPolicy): object[] {
  const { maxAttempts, initialBackoffMs, maxBackoffMs, multiplier } = { ...DEFAULTS, ...policy };
  const attemptsFit = Number.isInteger(maxAttempts) && maxAttempts >= 0 && maxAttempts <= MAX_ATTEMPTS;
  check("maxAttempts", maxAttempts, attemptsFit, `it must be an integer in [0, ${MAX_ATTEMPTS}]`);
  for (const [name, value] of Object.entries({ initialBackoffMs, maxBackoffMs })) {
    check(name, value, value >= MIN_MS, `it must be at least ${MIN_MS} milliseconds`);
  }
  check("multiplier", multiplier, multiplier >= 1, "it must be at least 1");
  if (maxAttempts < 2) {
    return [];
  }
  const retryPolicy = {
    maxAttempts,
    initialBackoff: `${(initialBackoffMs / 1000).toFixed(9)}s`,
    maxBackoff: `${(maxBackoffMs / 1000).toFixed(9)}s`,
    backoffMultiplier: multiplier,
    retryableStatusCodes: ["UNAVAILABLE"],
  };
  return [{ name: [{}], retryPolicy }];
}

function check(name: string, value: unknown, inRange: boolean, allowed: string): void {
  if (!(inRange && Number.isFinite(value))) {
    throw new ArgumentError(`retry.${name}`, `${String(value)} is not allowed; ${allowed}`);
  }
}
