/** One answer as it is generated, and the whole answer. */

import { create } from "@bufbuild/protobuf";
import { cancelledError } from "./connection.js";
import { InternalError } from "./errors.js";
import * as pb from "./gen/draftwood/v1/generation_pb.js";

/** One of several answers to the same prompt, as in `Completion`. */
export interface Sample {
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** One for each token, with the option `tokenDetails` or `topLogprobs`. */
  readonly details: readonly pb.TokenDetail[];
  readonly finishReason: pb.FinishReason;
  /** The stop string or stop token id that ended it. */
  readonly matchedStop: string | number | undefined;
  /** A request with the same seed gets the same answer. Undefined in greedy decoding. */
  readonly seed: bigint | undefined;
}

/**
 * A whole answer: all deltas joined. With several samples, text, tokens, finish reason and details are those of the first
 * one; `samples` contains all of them, and usage, timings and drafting cover all of them.
 */
export interface Completion extends Sample {
  readonly samples: readonly Sample[];
  readonly requestId: string;
  readonly usage: pb.Usage;
  readonly timings: pb.Timings;
  readonly drafting: pb.DraftStatistics;
  /** The events that began and ended the answer. */
  readonly started: pb.Started;
  readonly finished: pb.Finished;
}

/**
 * One answer as it is generated: deltas to iterate over. The request is sent when the loop begins, and cancelled when it
 * is left early.
 */
export class GenerationStream implements AsyncIterable<pb.Delta> {
  readonly requestId: string;
  /** Set when the server has admitted the request. */
  started: pb.Started | undefined;
  /** Set when the answer is complete. */
  finished: pb.Finished | undefined;
  readonly #scope = new AbortController();
  readonly #received: pb.Delta[] = [];
  readonly #deltas: AsyncGenerator<pb.Delta, undefined, undefined>;
  #error: unknown;

  /** @internal `open` sends the request, which aborting the controller cancels. */
  constructor(requestId: string, open: (scope: AbortController) => AsyncIterable<pb.GenerateResponse>) {
    this.requestId = requestId;
    this.#deltas = this.#read(open(this.#scope));
  }

  /** @throws StatusError the request failed; `RequestCancelledError` after `cancel`. */
  [Symbol.asyncIterator](): AsyncIterator<pb.Delta, undefined, undefined> {
    return this.#deltas;
  }

  /** Cancels the request on client and server; no effect after its end. `reason` is the cause of the error. */
  cancel(reason?: unknown): void {
    this.#scope.abort(reason);
  }

  /** The whole answer; reads the rest of the stream first. Throws `StatusError`. */
  async completion(): Promise<Completion> {
    while (!(await this.#deltas.next()).done);
    const { started, finished } = this;
    if (!started || !finished) {
      throw this.#error ?? cancelledError(this.requestId, this.#scope.signal.reason);
    }
    return {
      ...this.#sample(0, finished, started.seed),
      samples: finished.samples.map((end, index) => this.#sample(index, end, end.seed)),
      requestId: started.requestId,
      usage: finished.usage ?? create(pb.UsageSchema),
      timings: finished.timings ?? create(pb.TimingsSchema),
      drafting: finished.drafting ?? create(pb.DraftStatisticsSchema),
      ...{ started, finished },
    };
  }

  /** Ignores events of unknown kinds, and deltas that keep up a cadence. */
  async *#read(events: AsyncIterable<pb.GenerateResponse>): AsyncGenerator<pb.Delta, undefined, undefined> {
    try {
      for await (const { event } of events) {
        if (event.case === "started") {
          this.started = event.value;
        } else if (event.case === "finished") {
          this.finished = event.value;
        } else if (event.case && (event.value.tokenIds.length > 0 || event.value.text || event.value.finished)) {
          this.#received.push(event.value);
          yield event.value;
        }
      }
      if (!this.started || !this.finished) {
        const message = `the server ended the stream without ${this.started ? "Finished" : "Started"}`;
        throw new InternalError(message, { code: "INTERNAL", requestId: this.requestId });
      }
    } catch (error) {
      this.#error = error;
      throw error;
    }
  }

  #sample(index: number, end: pb.Finished | pb.SampleResult, seed: bigint | undefined): Sample {
    const deltas = this.#received.filter((delta) => delta.sample === index);
    return {
      text: deltas.map((delta) => delta.text).join(""),
      tokenIds: deltas.flatMap((delta) => delta.tokenIds),
      details: deltas.flatMap((delta) => delta.details),
      finishReason: end.reason,
      matchedStop: end.matchedStop.value,
      seed,
    };
  }
}
