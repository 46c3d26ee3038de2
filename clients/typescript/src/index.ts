/** Client for Draftwood: typed, streaming, on Connect's gRPC transport for Node. */

export { durationMs } from "@bufbuild/protobuf/wkt";
export { AdminClient, Client } from "./client.js";
export type { ServiceClient } from "./connection.js";
export * from "./errors.js";
export * from "./gen/draftwood/admin/v1/audit_pb.js";
export * from "./gen/draftwood/admin/v1/experiments_pb.js";
export * from "./gen/draftwood/admin/v1/status_pb.js";
export * from "./gen/draftwood/admin/v1/tenants_pb.js";
export * from "./gen/draftwood/v1/generation_pb.js";
export * from "./gen/draftwood/v1/memory_pb.js";
export type { CallOptions, ClientOptions, ConnectionOptions, TlsConfig } from "./options.js";
export type { ChatMessage, ContentPart, GenerateOptions, Tool, ToolCall } from "./request.js";
export type {
  Completion,
  Delta,
  FinishReason,
  GenerationStream,
  Part,
  Sample,
  SampleResult,
  Written,
} from "./stream.js";
