"""Paged attention in plain XLA and spelled out, over the cases that every implementation shares."""

from __future__ import annotations

from tests.kernels.suite import AttentionSuite


class TestXla(AttentionSuite):
    implementation = "xla"


class TestReference(AttentionSuite):
    implementation = "reference"
    examples = 6

    # Not promised: XLA sees the whole batch's shape where it compiles the loop over tokens.
    test_nor_on_the_shapes_of_its_batch = None
