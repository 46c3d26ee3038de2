"""The device of these tests: a CPU, where kernels are interpreted, or the one that `make test-gpu` names."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("GPU_TEST_DEVICE", "cpu"))
