"""From a plan to tokens: padded inputs, the jitted step, sampling, and who compiles what.

``buckets`` decides shapes, ``inputs`` fills them, ``step`` runs them, ``sample`` and ``verify`` choose tokens,
``compile_log`` counts and explains compilations.
"""
