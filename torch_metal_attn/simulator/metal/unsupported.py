"""Features that the simulator does not support, and the words that use them."""

from . import versions
from .lexer import TokenList

# Types, attributes, qualifiers, and names of headers without the prefix `metal_`.
WORDS = {
    "textures": """texture texture1d texture1d_array texture2d texture2d_array texture2d_ms
        texture2d_ms_array texture3d texturecube texturecube_array texture_buffer depth2d
        depth2d_array depth2d_ms depth2d_ms_array depthcube depthcube_array""",
    "samplers": "sampler",
    "vertex functions": "vertex vertex_id stage_in patch_control_point",
    "fragment functions": "fragment interpolant interpolate",
    "object and mesh functions": "object mesh mesh_grid_properties",
    "imageblocks": "imageblock imageblocks imageblock_data",
    "function tables": "visible_function_table intersection_function_table",
    "ray tracing": """raytracing intersection acceleration_structure
        instance_acceleration_structure primitive_acceleration_structure intersector
        intersection_query""",
    "command buffers": "command_buffer render_command compute_command compute_pipeline_state",
    "asynchronous copies": "simdgroup_event",
}
SUBJECTS = {word: subject for subject, words in WORDS.items() for word in words.split()}
# Qualifiers of functions other than kernels. They may also be attributes in brackets.
STAGES = ("vertex", "fragment", "object", "mesh", "intersection")

METHOD = (
    "methods of objects in device, threadgroup or constant memory are not supported by the "
    "simulator: copy the object to a variable and call the variable's method"
)


def reason(word: str) -> str | None:
    """The reason why a text with the word does not compile; None if the word is supported."""
    if subject := SUBJECTS.get(word):
        return f"{subject} are not supported by the simulator".replace("ing are", "ing is")
    if version := versions.DECLARED.get(word):
        return f"`{word}` needs Metal {version}: " + versions.advice(version)
    return None


def refuse_stages(tokens: TokenList) -> None:
    """Raise MetalSourceError for attributes such as `[[vertex]]`, which later passes remove."""
    for index in tokens.find(*STAGES):
        if tokens.text(index - 2) == "[" == tokens.text(index - 1):
            raise tokens.error(index, str(reason(tokens.text(index))))
