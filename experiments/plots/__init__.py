"""Drawing: every picture is made from figures and verdict rows read back from a run directory; nothing is run here."""
