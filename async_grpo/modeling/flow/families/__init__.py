"""The families of flow-matching models: how each reads its prompt, predicts the velocity and decodes a picture.

diffusers provides models, pipelines and text encoders. A family contains only what is special about one class of
pipelines.
"""

from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.families.flux import FluxFamily
from async_grpo.modeling.flow.families.labels import LabelFamily
from async_grpo.modeling.flow.families.qwen_image import QwenImageFamily
from async_grpo.modeling.flow.families.stable_diffusion_3 import StableDiffusion3Family

# Class of the pipeline -> its family
FAMILIES: dict[str, FlowFamily] = {
    family.pipeline_class: family
    for family in (LabelFamily(), StableDiffusion3Family(), FluxFamily(), QwenImageFamily())
}
