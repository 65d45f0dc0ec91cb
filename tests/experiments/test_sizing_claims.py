"""The claims that sizing judges, with their figures."""

from __future__ import annotations

import pytest

from experiments import sizing_claims
from paxkv.config import OPT_13B
from paxkv.sim.hardware import A100_40GB
from paxkv.sizing import GIB, KVLayout


def test_a_mean_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="mean_tokens must be positive, got 0"):
        sizing_claims.claim_margin(0, KVLayout.of(OPT_13B))


def test_claim_5_share_of_the_card():
    found = sizing_claims.claim_kv_share(A100_40GB.memory_bytes)
    assert (found.claim, found.verdict) == (5, "conditional")
    assert found.ours == pytest.approx(0.3047, abs=1e-4)
    assert "25.7 GB" in found.explanation and "34.2%" in found.explanation


def test_claim_6_formula():
    found = sizing_claims.claim_kv_formula()
    assert (found.claim, found.verdict, found.ours) == (6, "conditional", 8.0)
    assert "56.9 times" in found.explanation
    assert sizing_claims.claim_kv_formula(OPT_13B).verdict == "confirmed"


def test_claim_7_llama_3_70b():
    over = sizing_claims.claim_llama_70b(20, 8_000, 40)
    assert (over.claim, over.verdict, over.ours) == (7, "confirmed", 52.4288)
    about = sizing_claims.claim_llama_70b(32, 8_192, 65, exact=True)
    assert (about.claim, about.verdict) == (7, "refuted")
    assert about.ours == pytest.approx(85.9, abs=0.05) and "80.0 GiB" in about.explanation


@pytest.mark.parametrize(
    ("page_size", "mean_tokens", "ours", "verdict"),
    [
        (16, 445, 7.5 / 452.5, "refuted"),
        (128, 445, 63.5 / 508.5, "confirmed"),
        (1024, 445, 511.5 / 956.5, "refuted"),  # not nearly enough
    ],
)
def test_claim_8_margin(page_size, mean_tokens, ours, verdict):
    found = sizing_claims.claim_margin(mean_tokens, KVLayout.of(OPT_13B, page_size))
    assert (found.claim, found.verdict) == (8, verdict)
    assert found.ours == pytest.approx(ours, rel=1e-4)


def test_claim_25_local_card():
    found = sizing_claims.claim_local_card(24 * GIB, mean_tokens=2_000)
    assert (found.claim, found.verdict, found.ours) == (25, "conditional", 18)
    assert "36,192 token slots" in found.explanation and "4 users" in found.explanation
    assert sizing_claims.claim_local_card(24 * GIB, mean_tokens=8_192).verdict == "confirmed"
    assert sizing_claims.claim_local_card(48 * GIB, mean_tokens=2_000).verdict == "refuted"
    with pytest.raises(ValueError, match="at least 1 pages are needed"):
        sizing_claims.claim_local_card(8 * GIB, mean_tokens=2_000)
