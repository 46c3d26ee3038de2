/** Client for Draftwood: typed, streaming, on @grpc/grpc-js. */

export { AdminClient, type Requests, type ServiceClient } from "./admin.js";
export type { CallOptions } from "./calls.js";
export { Client } from "./client.js";
export type { ClientOptions, ConnectionOptions, TlsConfig } from "./connection.js";
export {
  AbortedError,
  ArgumentError,
  ClientClosedError,
  DeadlineError,
  DraftwoodError,
  type ErrorDetails,
  FailedPreconditionError,
  type FieldViolation,
  InternalError,
  InvalidRequestError,
  NotFoundError,
  PermissionDeniedError,
  QuotaExceededError,
  RequestCancelledError,
  ResourceExhaustedError,
  type StatusCode,
  StatusError,
  UnauthenticatedError,
  UnavailableError,
  UnimplementedError,
} from "./errors.js";
export type {
  AuditCounts,
  AuditDifference,
  GetAuditReportResponse,
} from "./gen/draftwood/admin/v1/audit_pb.js";
export {
  type ArmComparison,
  ArmMemory,
  type ArmRow,
  type Conclusion,
  ConclusionKind,
  type Experiment,
  type ExperimentArm,
  type ExperimentReport,
  ExperimentState,
  ExperimentUnit,
  Verdict,
} from "./gen/draftwood/admin/v1/experiments_pb.js";
export { type LoadStatus, type ServerStatus, ServingState } from "./gen/draftwood/admin/v1/status_pb.js";
export { LearningScope, ResourceOrigin, type Tenant } from "./gen/draftwood/admin/v1/tenants_pb.js";
export {
  type GetMemoryStatisticsResponse,
  MemoryKind,
  type MemoryRecord,
  type MemoryStoreStatistics,
  type OrphanedMemory,
  type TenantMemoryStatistics,
} from "./gen/draftwood/v1/memory_pb.js";
export type { ChatMessage, GenerateOptions, Prompt, Tool, ToolCall } from "./request.js";
export type * from "./results.js";
export { NO_RETRY, type RetryPolicy } from "./retry.js";
export type { GenerationStream } from "./stream.js";
export { ToolCallReader } from "./tools.js";
