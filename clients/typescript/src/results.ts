/** The server's answers, as plain values without protobuf. Times are in milliseconds. */

/**
 * "stop": an end-of-sequence token, a stop token or a stop string. "length": `maxTokens`, or the end of the context.
 * "unknown": a reason of a newer server that this client does not know.
 */
export type FinishReason = "stop" | "length" | "unknown";

/** One of the most probable tokens at a position. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
  /** As in `TokenDetail`. */
  readonly tokenBytes: Uint8Array;
}

/** One token. */
export interface TokenDetail {
  /**
   * The characters that were sent with it: those that it completed, but for what may begin a stop string, which comes
   * with a later one.
   */
  readonly text: string;
  /** Whether it was accepted from a draft. */
  readonly drafted: boolean;
  /** Its log-probability by the model's own logits; undefined without the option `topLogprobs`. */
  readonly logprob: number | undefined;
  /** The most probable tokens, best first. */
  readonly topLogprobs: readonly TokenLogprob[];
  /** The token itself: UTF-8 where it is whole characters, a special token's name. */
  readonly tokenBytes: Uint8Array;
  /** It is a special token, which the text is without. The bytes of the others together are the text. */
  readonly leftOut: boolean;
}

/** The draft tokens that one step verified. */
export interface DraftTree {
  readonly tokenIds: readonly number[];
  /** The text of each; U+FFFD for a token that is part of a character. */
  readonly tokens: readonly string[];
  /** Index of each one's parent; -1 for the last token before the step. */
  readonly parents: readonly number[];
  /** Indexes of the accepted ones, from the root down. */
  readonly accepted: readonly number[];
}

/** All tokens of one step, or of several steps if the client reads more slowly than the model writes. */
export interface Delta {
  /** Whole characters; the bytes of an unfinished one are in a later delta. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** One for each token, with the option `tokenDetails` or `topLogprobs`. */
  readonly details: readonly TokenDetail[];
  /** Index of the sample, from 0. */
  readonly sample: number;
  /** Of the steps, the last 64 at most, with the option `draftTrees`. */
  readonly draftTrees: readonly DraftTree[];
  /** Of several samples, the end of this one; such a delta may be without tokens. */
  readonly finished: SampleFinished | undefined;
}

/** The server admitted the request. */
export interface Started {
  readonly requestId: string;
  readonly model: string;
  readonly tenant: string;
  /** The drafting strategy; "none" if drafting is off. */
  readonly strategy: string;
  readonly promptTokens: number;
  /** The largest number of tokens that the answer can have. */
  readonly maxTokens: number;
  /** The seed of the answer; a request with the same seed gets the same answer. Undefined in greedy decoding. */
  readonly seed: bigint | undefined;
  /** The experiment that the request takes part in; empty if it is in none. */
  readonly experiment: string;
  /** The arm of the request in `experiment`. */
  readonly arm: string;
}

export interface Usage {
  readonly promptTokens: number;
  readonly completionTokens: number;
  /** Tokens of the prompt's prefix that was in the prefix cache. */
  readonly cachedPromptTokens: number;
}

export interface Timings {
  /** From arrival to the first step. */
  readonly queueMs: number;
  /** From the first step to the first token. */
  readonly prefillMs: number;
  /** From the first token to the last. */
  readonly decodeMs: number;
}

/** Draft tokens proposed by one strategy and verified, and how many of them were accepted. */
export interface SourceStatistics {
  readonly draftTokens: number;
  readonly acceptedTokens: number;
}

/** Drafting statistics of one answer. */
export interface DraftStatistics {
  /** The drafting strategy; "none" if drafting was off. */
  readonly strategy: string;
  /** Tokens per decoding step, the model's own included: 1.0 without drafts. */
  readonly meanAcceptanceLength: number;
  /** Decoding steps, without prefill. */
  readonly steps: number;
  /** Verified draft tokens. */
  readonly draftTokens: number;
  readonly acceptedTokens: number;
  /** At index d, the number of steps that accepted at least d + 1 draft tokens. */
  readonly acceptedByDepth: readonly number[];
  /** Counts by the strategy that proposed the token. */
  readonly bySource: Readonly<Record<string, SourceStatistics>>;
  /** Drafting for this answer, learning included. */
  readonly draftMs: number;
  /** The steps that this answer was part of. */
  readonly stepMs: number;
  /** The model's forward passes in these steps. */
  readonly modelMs: number;
  /** Why drafting was switched off during the answer; empty if it was not. */
  readonly disabledReason: string;
}

/** The end of one of several samples, and the seed that generates it alone. */
export interface SampleFinished {
  readonly reason: FinishReason;
  /** The stop string or stop token id that ended the sample. */
  readonly matchedStop: string | number | undefined;
  readonly seed: bigint | undefined;
}

/** The end of an answer. With several samples, usage, timings and drafting cover all of them. */
export interface Finished {
  /** Finish reason of the first sample. */
  readonly reason: FinishReason;
  /** The stop string or stop token id that ended the first sample. */
  readonly matchedStop: string | number | undefined;
  readonly usage: Usage;
  readonly timings: Timings;
  readonly drafting: DraftStatistics;
  /** The ends of all samples, if there are several. */
  readonly samples: readonly SampleFinished[];
}

/** One of several answers to the same prompt, as in `Completion`. */
export interface Sample {
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly finishReason: FinishReason;
  readonly matchedStop: string | number | undefined;
  readonly seed: bigint | undefined;
  readonly details: readonly TokenDetail[];
}

/**
 * A whole answer: all deltas joined, with the fields of `Started` and `Finished`.
 *
 * With several samples, text, tokens, finish reason and details are those of the first one; `samples` contains all of
 * them, and usage, timings and drafting cover all of them.
 */
export interface Completion extends Sample {
  readonly usage: Usage;
  readonly timings: Timings;
  readonly drafting: DraftStatistics;
  readonly requestId: string;
  readonly model: string;
  readonly tenant: string;
  readonly samples: readonly Sample[];
  readonly experiment: string;
  readonly arm: string;
}

/** Token ids and the text of each; U+FFFD in the text of a token that is part of a character. */
export interface Tokenization {
  readonly tokenIds: readonly number[];
  readonly tokens: readonly string[];
}

/** The served model and its limits. */
export interface ModelInfo {
  readonly model: string;
  readonly architecture: string;
  readonly parameters: number;
  readonly dtype: string;
  /** What the weights are stored as: the dtype, "int8", "int4", or the quantization of the checkpoint. */
  readonly weights: string;
  readonly device: string;
  readonly vocabSize: number;
  /** Prompt and answer together. */
  readonly maxContextTokens: number;
  readonly maxRunningRequests: number;
  readonly maxWaitingRequests: number;
  /** The server's limit of draft nodes per step. */
  readonly maxDraftNodes: number;
  readonly hasChatTemplate: boolean;
  readonly strategies: readonly string[];
  readonly defaultStrategy: string;
  readonly eosTokenIds: readonly number[];
  readonly serverVersion: string;
  /** Logits are the same to the last bit with and without drafts, in any batch. */
  readonly exact: boolean;
  /** What computes the steps, "cuda", "openvino" or "torch", and why it was chosen. */
  readonly runner: string;
  readonly runnerReason: string;
  /** How the model writes calls of tools; undefined if it is given none, and why. */
  readonly toolFormat: ToolFormat | undefined;
  readonly noToolsReason: string;
}

/** A call is `begin`, a JSON object with the name and the arguments, and `end`. */
export interface ToolFormat {
  /** Before the first call and after the last, without special tokens. */
  readonly begin: string;
  readonly end: string;
  /** Between two calls; undefined for a model that writes one call at most. */
  readonly between: string | undefined;
  /** Keys of the object. */
  readonly nameKey: string;
  readonly argumentsKey: string;
}
