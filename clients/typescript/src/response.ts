/** Converts the server's messages to `results`, and joins a stream into one answer. Does no I/O. */

import { create } from "@bufbuild/protobuf";
import type { Duration } from "@bufbuild/protobuf/wkt";
import * as pb from "./gen/draftwood/v1/generation_pb.js";
import type {
  Completion,
  Delta,
  DraftStatistics,
  Finished,
  FinishReason,
  ModelInfo,
  Sample,
  SampleFinished,
  Started,
  TokenDetail,
  Tokenization,
} from "./results.js";
import { protocolError } from "./status.js";

/** One answer, built from its events: at most one Started, deltas, one Finished. */
export class Answer {
  started: Started | undefined;
  finished: Finished | undefined;
  readonly #deltas: Delta[] = [];

  /**
   * Adds an event; returns its delta if it is one. Ignores events of unknown kinds, and deltas without tokens, which keep
   * up a cadence. The end of a sample counts.
   */
  take({ event }: pb.GenerateResponse): Delta | undefined {
    switch (event.case) {
      case "started":
        this.started = started(event.value);
        return undefined;
      case "finished":
        this.finished = finished(event.value);
        return undefined;
      case "delta": {
        if (event.value.tokenIds.length === 0 && event.value.text === "" && !event.value.finished) {
          return undefined;
        }
        const one = delta(event.value);
        this.#deltas.push(one);
        return one;
      }
    }
    return undefined;
  }

  /** @throws InternalError the stream ended with OK but without Started or Finished. */
  completion(): Completion {
    const { started, finished } = this.#complete();
    const first: SampleFinished = { reason: finished.reason, matchedStop: finished.matchedStop, seed: started.seed };
    const { usage, timings, drafting } = finished;
    const { requestId, model, tenant, experiment, arm } = started;
    const samples = finished.samples.map((end, index) => this.#sample(index, end));
    return {
      ...this.#sample(0, first),
      ...{ usage, timings, drafting, requestId, model, tenant, samples, experiment, arm },
    };
  }

  /** @throws InternalError as `completion`. */
  checkComplete(): void {
    this.#complete();
  }

  #complete(): { started: Started; finished: Finished } {
    const { started, finished } = this;
    if (!started || !finished) {
      const missing = started ? "Finished" : "Started";
      throw protocolError(`the server ended the stream without ${missing}`, started?.requestId ?? "");
    }
    return { started, finished };
  }

  #sample(index: number, end: SampleFinished): Sample {
    const deltas = this.#deltas.filter((one) => one.sample === index);
    return {
      text: deltas.map((one) => one.text).join(""),
      tokenIds: deltas.flatMap((one) => one.tokenIds),
      finishReason: end.reason,
      matchedStop: end.matchedStop,
      seed: end.seed,
      details: deltas.flatMap((one) => one.details),
    };
  }
}

export function tokenization(message: pb.TokenizeResponse): Tokenization {
  return { tokenIds: message.tokenIds, tokens: message.tokens };
}

export function modelInfo(message: pb.GetModelInfoResponse): ModelInfo {
  const { $typeName, $unknown, generationDefaults, limits, memoryMaxBytes, toolFormat: form, ...info } = message;
  const toolFormat = form && {
    ...{ begin: form.begin, end: form.end, between: form.between },
    ...{ nameKey: form.nameKey, argumentsKey: form.argumentsKey },
  };
  return { ...info, toolFormat, parameters: Number(info.parameters) };
}

function started(message: pb.Started): Started {
  const { $typeName, $unknown, seed, ...rest } = message;
  return { ...rest, seed };
}

function delta(message: pb.Delta): Delta {
  const { text, tokenIds, details, sample, draftTrees, finished } = message;
  return {
    ...{ text, tokenIds, sample },
    details: details.map(detail),
    draftTrees: draftTrees.map(({ tokenIds, tokens, parents, accepted }) => ({ tokenIds, tokens, parents, accepted })),
    finished: finished && { ...end(finished), seed: finished.seed },
  };
}

function detail(message: pb.TokenDetail): TokenDetail {
  const { text, drafted, logprob, topLogprobs, tokenBytes, leftOut } = message;
  return {
    ...{ text, drafted, logprob, tokenBytes, leftOut },
    topLogprobs: topLogprobs.map(({ tokenId, logprob, tokenBytes }) => ({ tokenId, logprob, tokenBytes })),
  };
}

function finished(message: pb.Finished): Finished {
  const { promptTokens, completionTokens, cachedPromptTokens } = message.usage ?? create(pb.UsageSchema);
  const { queue, prefill, decode } = message.timings ?? create(pb.TimingsSchema);
  return {
    ...end(message),
    usage: { promptTokens, completionTokens, cachedPromptTokens },
    timings: { queueMs: milliseconds(queue), prefillMs: milliseconds(prefill), decodeMs: milliseconds(decode) },
    drafting: draftStatistics(message.drafting ?? create(pb.DraftStatisticsSchema)),
    samples: message.samples.map((one) => ({ ...end(one), seed: one.seed })),
  };
}

function end(message: pb.Finished | pb.SampleResult): Omit<SampleFinished, "seed"> {
  return { reason: REASONS[message.reason] ?? "unknown", matchedStop: message.matchedStop.value };
}

const REASONS: Partial<Record<pb.FinishReason, FinishReason>> = {
  [pb.FinishReason.STOP]: "stop",
  [pb.FinishReason.LENGTH]: "length",
};

function draftStatistics(message: pb.DraftStatistics): DraftStatistics {
  const { strategy, meanAcceptanceLength, disabledReason } = message;
  const sources = Object.entries(message.bySource).sort(([a], [b]) => (a < b ? -1 : 1));
  return {
    strategy,
    meanAcceptanceLength,
    steps: Number(message.steps),
    draftTokens: Number(message.draftTokens),
    acceptedTokens: Number(message.acceptedTokens),
    acceptedByDepth: message.acceptedByDepth.map(Number),
    bySource: Object.fromEntries(
      sources.map(([name, { draftTokens, acceptedTokens }]) => [
        name,
        { draftTokens: Number(draftTokens), acceptedTokens: Number(acceptedTokens) },
      ]),
    ),
    draftMs: milliseconds(message.draftTime),
    stepMs: milliseconds(message.stepTime),
    modelMs: milliseconds(message.modelTime),
    disabledReason,
  };
}

function milliseconds(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : 0;
}
