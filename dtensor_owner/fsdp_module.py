"""FSDPModule: what fully_shard adds to a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from dtensor_owner.module_state import ModuleState
from dtensor_owner.parameter_group import ParameterGroup


class FSDPModule:
    """What ``fully_shard`` adds to a module's class."""

    _fully_shard_state: ModuleState

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """The groups that one call of ``fully_shard`` made, by dtype and ``requires_grad``."""
        return self._fully_shard_state.groups

    @property
    def not_quantized(self) -> Mapping[str, str]:
        """Parameters that ``mxfp8`` was asked for and left in an ordinary group, and why."""
        return self._fully_shard_state.not_quantized

    def unshard(self) -> None:
        """Gather this module's weights (not those of sharded modules below).

        Until ``reshard``, or until a backward through the module ends, attributes such as
        ``module.weight`` are full tensors, which forwards and backwards use too. Parameters,
        ``state_dict`` and optimizers stay sharded, and writes to the full tensors are lost. All
        ranks must call it.
        """
        self._fully_shard_state.unshard()

    def reshard(self) -> None:
        """Free the weights that ``unshard`` has gathered."""
        self._fully_shard_state.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any module; also drops what backwards have added up here under ``no_sync``.

        ``optimizer.zero_grad()`` knows nothing of that, nor does a parent that is not sharded.
        """
        assert isinstance(self, nn.Module)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                for group in module.parameter_groups:
                    group.drop_accumulated()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the class that was sharded

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients or adds them up on each rank.

        While off, ``.grad`` is left alone and each rank holds full gradients of the groups that
        were used. The first backward with it on reduces their sum with its own gradients. One
        that starts from the root's output does so also in modules which it does not use.

        Args:
            requires_gradient_sync: True by default.
            recurse: Also for sharded modules below.
        """
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else [self]:
            if isinstance(module, FSDPModule):
                for group in module.parameter_groups:
                    group.sync_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """``set_requires_gradient_sync(False)`` for backwards in this context."""
        assert isinstance(self, nn.Module)
        groups = [
            group
            for module in self.modules()
            if isinstance(module, FSDPModule)
            for group in module.parameter_groups
        ]
        before = [group.sync_gradients for group in groups]
        for group in groups:
            group.sync_gradients = False
        try:
            yield
        finally:
            for group, sync in zip(groups, before):
                group.sync_gradients = sync
