"""ComfyUI's attention on these kernels.

`patch(model)` gives a model this attention. `nodes` has the node that does it in a workflow, and
`install` writes the files that make ComfyUI load that node. Nothing here imports ComfyUI.
"""

from torch_metal_attn.integrations.comfyui.attention import Attention, patch

__all__ = ["Attention", "patch"]
