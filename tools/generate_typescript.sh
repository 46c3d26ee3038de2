#!/usr/bin/env bash
# Generates the messages of the TypeScript client into the folder given (default: clients/typescript/src/gen, where they
# are committed). Needs the development environment (`make setup`) and the packages of clients/typescript (`npm install`).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
modules=$PWD/clients/typescript/node_modules
out=$(realpath --canonicalize-missing "${1:-clients/typescript/src/gen}")

protos=$(mktemp -d)
trap 'rm -rf "$protos"' EXIT
google=$("$python" -c "from google.rpc import error_details_pb2 as details; print(details.__file__.rpartition('/')[0])")
mkdir -p "$protos"/{draftwood/v1,draftwood/admin/v1,google/rpc}
cp protos/draftwood/v1/{generation,memory}.proto "$protos/draftwood/v1"
cp protos/draftwood/admin/v1/*.proto "$protos/draftwood/admin/v1"
cp -r protos/google/api "$protos/google"
cp "$google/error_details.proto" "$protos/google/rpc"

rm -rf "$out"
cat > "$protos/buf.gen.yaml" <<END
version: v2
plugins:
  - local: $modules/.bin/protoc-gen-es
    out: $out
    opt: [target=ts, import_extension=js]
END
"$(dirname "$python")/buf" generate "$protos" --template "$protos/buf.gen.yaml"
