"""diffusers' active backend belongs to the process, so each test restores it."""

import pytest
from diffusers.models.attention_dispatch import attention_backend


@pytest.fixture
def metal_attn():
    with attention_backend("metal_attn"):
        yield
