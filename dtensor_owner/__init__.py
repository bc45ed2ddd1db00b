"""Unpadded sharding and owner-computed Muon on top of the ``placements`` package."""

from dtensor_owner.buffer import DBuffer
from dtensor_owner.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from dtensor_owner.exchange import OwnerGatherPlan, OwnerScatterPlan
from dtensor_owner.fully_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from dtensor_owner.layout import (
    GlobalLayout,
    PaddingReport,
    ShardLayout,
    build_row_atomic_layout,
    build_whole_tensor_layout,
)
from dtensor_owner.muon import Muon
from dtensor_owner.muon_groups import MuonParamGroups, muon_param_groups
from dtensor_owner.mxfp8 import MXFP8Tensor
from dtensor_owner.mxfp8_weights import MXFP8Policy
from dtensor_owner.newton_schulz import newton_schulz
from dtensor_owner.owners import (
    GroupOwnerLayout,
    OwnerPlan,
    ParameterLayout,
    assign_owner_work,
    ns_cost_fn,
    ns_flops_cost_fn,
    plan_owners,
    select_ge_2d_params,
)
from dtensor_owner.quantized_buffer import QuantizedDBuffer
from dtensor_owner.safetensors_io import export_safetensors, import_safetensors
from dtensor_owner.whole_tensors import WholeTensors
from placements import (
    BlockAtomic,
    Owner,
    Plan,
    RowAtomic,
    distribute_module,
    distribute_tensor,
    explain,
    redistribute_group,
)

__all__ = [
    "BlockAtomic",
    "Owner",
    "Plan",
    "RowAtomic",
    "distribute_module",
    "distribute_tensor",
    "explain",
    "redistribute_group",
    "DBuffer",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "MXFP8Policy",
    "MXFP8Tensor",
    "QuantizedDBuffer",
    "fully_shard",
    "GroupOwnerLayout",
    "Muon",
    "MuonParamGroups",
    "muon_param_groups",
    "OwnerGatherPlan",
    "OwnerPlan",
    "OwnerScatterPlan",
    "ParameterLayout",
    "assign_owner_work",
    "newton_schulz",
    "ns_cost_fn",
    "ns_flops_cost_fn",
    "plan_owners",
    "select_ge_2d_params",
    "GlobalLayout",
    "PaddingReport",
    "ShardLayout",
    "build_row_atomic_layout",
    "build_whole_tensor_layout",
    "WholeTensors",
    "CheckpointError",
    "export_safetensors",
    "import_safetensors",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
