"""ComfyUI's attention on these kernels.

`patch(model)` makes a model use this attention. `nodes` has the node for workflows, and `install`
writes the files with which ComfyUI loads that node. Nothing here imports ComfyUI.
"""

from torch_metal_attn.integrations.comfyui.attention import Attention, patch

__all__ = ["Attention", "patch"]
