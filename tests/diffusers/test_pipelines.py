"""Whole pipelines, from the prompt's embedding to pixels, against torch's own attention."""

import numpy as np
import pytest
from diffusers.models.attention_dispatch import attention_backend

from tests.diffusers.test_families import TOLERANCE, launches
from tests.diffusers.tiny_pipelines import PIPELINES


@pytest.mark.parametrize("name", PIPELINES)
def test_pixels(name, device, metal_attn):
    pipeline = PIPELINES[name]
    with attention_backend("native"):
        expected = np.asarray(pipeline.run())
    before = launches()
    actual = np.asarray(pipeline.run())
    assert launches() - before == pipeline.calls
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert expected.std() > 0.05, "nothing but grey"
