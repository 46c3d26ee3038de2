/** A method of a generated service, as @grpc/grpc-js calls it. */

import { type DescMessage, type DescMethod, fromBinary, type MessageShape, toBinary } from "@bufbuild/protobuf";

export interface Rpc<Request, Response> {
  readonly path: string;
  readonly serialize: (message: Request) => Buffer;
  readonly deserialize: (bytes: Buffer) => Response;
}

export function rpc<I extends DescMessage, O extends DescMessage>(
  method: DescMethod & { input: I; output: O },
): Rpc<MessageShape<I>, MessageShape<O>> {
  return {
    path: `/${method.parent.typeName}/${method.name}`,
    serialize: (message) => {
      const bytes = toBinary(method.input, message);
      return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    },
    deserialize: (bytes) => fromBinary(method.output, bytes),
  };
}
