"""`Trainer(sync_batchnorm=True)`: Lightning's plugin converts layers to torch's, which need a GPU.

The Trainer gives its own plugin to the strategy; this one takes its place there.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from hvd_strategy.lightning.class_tree import ClassTree, class_tree

if TYPE_CHECKING:
    from lightning.pytorch.plugins import LayerSync as _Base
else:
    _Base = object


class SyncBatchNormPlugin(_Base):
    """Synchronises the BatchNorm layers of a model for the time of a fit."""

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        """Converts the layers; they stay the same objects."""
        # Not before it is needed: it imports torch's compiler.
        from hvd_strategy.sync_batchnorm import SyncBatchNorm

        return SyncBatchNorm.convert_sync_batchnorm(model)

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        """Gives them their own classes back."""
        from hvd_strategy.sync_batchnorm import revert_sync_batchnorm

        return revert_sync_batchnorm(model)


@cache
def plugin_class(tree_name: str) -> type[SyncBatchNormPlugin]:
    """Returns the plugin as a class of the tree; pickle finds it where it says."""
    tree = class_tree(tree_name)
    attributes = {"__module__": tree.public_module}
    bases = (SyncBatchNormPlugin, tree.pytorch_name("plugins", "LayerSync"))
    return type(SyncBatchNormPlugin.__name__, bases, attributes)


def synchronised_layers(tree: ClassTree, layer_sync: Any) -> Any:
    """Returns our plugin where Lightning chose its own; any other, and None, as it is."""
    theirs = tree.pytorch_name("plugins", "TorchSyncBatchNorm")
    return plugin_class(tree.name)() if type(layer_sync) is theirs else layer_sync


__all__ = ["SyncBatchNormPlugin", "plugin_class", "synchronised_layers"]
