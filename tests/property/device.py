"""Where the property tests run: on the CPU, unless ``GRAPHDISPATCH_TEST_DEVICE`` names another device."""

import os

import torch

DEVICE = torch.device(os.environ.get("GRAPHDISPATCH_TEST_DEVICE", "cpu"))
IS_BIT_EXACT = DEVICE.type == "cpu"
"""Whether unpadded replays are promised to have eager's very bits."""
