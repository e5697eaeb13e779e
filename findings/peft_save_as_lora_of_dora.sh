#!/bin/bash
# PEFT 0.21.2: save_as_lora takes a DoRA adapter, and writes a plain LoRA adapter that computes something else.
#
# Expected: DoRA's change of a weight is a matrix, so its conversion at full rank is the same function, as for plain LoRA; or an
# error, as for KaSA ("do not support LoRA conversion").
# Seen: no error and no warning. The conversion of plain LoRA is exact, that of DoRA is nats off; merge_and_unload() of the same
# adapter is exact. lora.Linear.supports_lora_conversion is True for DoRA, and what is converted leaves its magnitudes out.
# Counterpoint refuses an adapter with use_dora, and names merge_and_unload as the way out, not this conversion.
# Exit code: 0 while this is so, 1 if it has changed. Needs 2 GB of disk for a while.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 peft==0.21.2
cat > "$place/compare.py" <<'PY'
import copy
import sys
import warnings

warnings.simplefilter("ignore")
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
    )
)
tokens = torch.arange(5, 25)[None]


def values(model):
    with torch.no_grad():
        return model.eval()(tokens).logits.log_softmax(-1)


def converted(use_dora):
    """Returns how far conversion and merging are from the adapter, in nats."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_dora=use_dora)
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    wanted = values(adapted)
    directory = f"{sys.argv[1]}/dora-{use_dora}"
    peft.save_as_lora(directory, adapted, rank=64)
    loaded = values(peft.PeftModel.from_pretrained(copy.deepcopy(base), directory))
    merged = values(adapted.merge_and_unload())
    return [float((each - wanted).abs().max()) for each in (loaded, merged)]


print(f"peft {peft.__version__}: nats between an adapter and its conversion at full rank, and its merged model")
found = {use_dora: converted(use_dora) for use_dora in (False, True)}
for use_dora, (by_conversion, by_merging) in found.items():
    print(f"{'DoRA' if use_dora else 'LoRA'}: save_as_lora {by_conversion:.6f}, merge_and_unload {by_merging:.6f}")
is_so = found[False][0] < 1e-3 and max(each[1] for each in found.values()) < 1e-3 and found[True][0] > 0.1
print("as described" if is_so else "this has changed")
sys.exit(not is_so)
PY
"$place/venv/bin/python" "$place/compare.py" "$place" 2> "$place/errors" || { cat "$place/errors"; exit 1; }
