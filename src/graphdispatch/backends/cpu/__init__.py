"""The CPU backend: records operators at torch's dispatcher and replays them against the same memory."""
