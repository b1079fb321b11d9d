"""Convert a Hugging Face folder to OpenVINO IR: python to_openvino.py SOURCE TARGET 8|4. Run by `checkpoints.py`."""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

_, source, target, bits = sys.argv
if bits == "4":  # the embedding, which is also the output matrix, stays at 8 bits, as in Headway
    quantisation = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
else:
    quantisation = OVWeightQuantizationConfig(bits=8, sym=True)
OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=quantisation).save_pretrained(target)
