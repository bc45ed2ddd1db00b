"""How well owners are balanced for known models, and how much moves.

    python benchmarks/owner_balance.py [--ranks 8 32 128 512]

Layers are laid out back to back, one group each. Load is ``ns_cost_fn(5)``. "per group" plans every
group alone (``assign_owner_work``), the others plan all together (``plan_owners``).
"""

from __future__ import annotations

import argparse
import time

from dtensor_owner import ParameterLayout, assign_owner_work, ns_cost_fn, plan_owners
from tests.model_shapes import (
    DEEPSEEK_V3_DENSE_LAYER,
    DEEPSEEK_V3_MOE_LAYER,
    GPT_2_LAYER,
    LLAMA_3_8B_LAYER,
    split_unpadded,
)

MODELS = {
    "Llama-3-8B": [LLAMA_3_8B_LAYER] * 32,
    "GPT-2": [GPT_2_LAYER] * 12,
    "DeepSeek-V3": [DEEPSEEK_V3_DENSE_LAYER] * 3 + [DEEPSEEK_V3_MOE_LAYER] * 58,
}


def per_group_imbalance(groups: list[dict[int, ParameterLayout]], ranks: int) -> float:
    cost = ns_cost_fn(5)
    loads = [0] * ranks
    for layouts in groups:
        for index, owner in assign_owner_work(layouts).items():
            loads[owner] += cost(layouts[index])
    return max(loads) * ranks / sum(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512])
    arguments = parser.parse_args()
    print(
        "| model | ranks | max/mean per group | together, holders | of bound | moved "
        "| together, any | of bound | moved | seconds |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, layers in MODELS.items():
        for ranks in arguments.ranks:
            of_shapes = {id(shapes): split_unpadded(shapes, ranks) for shapes in layers}
            groups = [of_shapes[id(shapes)] for shapes in layers]
            start = time.perf_counter()
            plans = [plan_owners(groups, eligible=eligible) for eligible in ("holders", "any")]
            seconds = time.perf_counter() - start
            cells = [
                f"{plan.imbalance:.2f} | {max(plan.loads) / plan.lower_bound:.3f} | "
                f"{plan.moved_numel / plan.total_numel:.0%}"
                for plan in plans
            ]
            print(
                f"| {name} | {ranks} | {per_group_imbalance(groups, ranks):.2f} | "
                f"{' | '.join(cells)} | {seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
