"""The kernels through Mesa's compiler for the GPU of M1 (G13; that of M2 is alike): `lens.py`.

Nothing runs. Metal text becomes SPIR-V (`spirv.py`), and the driver in `driver/` has Mesa compile
it to Apple's instructions, whose listing `listing.py` reads. `bench/agx/setup.sh` builds the
driver.
"""
