"""Define the parts of the plugin host and of the loaded config that the components and hooks of a run may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from spurline.plugins.registry import Registry


class HostView(Protocol):
    """The enabled plugins of a run: `spurline.plugins.host.PluginHost`."""

    registry: Registry
    """Create further components with `registry.create(kind, config, ...)`."""

    @property
    def hooks(self) -> Any:
        """Return the hooks, to be called with keywords: `hooks.on_step_start(step=1)`."""
        ...

    def attach(self, implementations: object, name: str) -> None:
        """Add hook implementations to this run, under a name such as `mine/watcher`."""
        ...

    def detach(self, name: str) -> None:
        """Remove the hook implementations that were attached under this name."""
        ...


class LoadedView(Protocol):
    """A loaded `RunConfig` with its plugins: `spurline.config.loading.LoadedConfig`."""

    @property
    def config(self) -> Any: ...

    @property
    def host(self) -> HostView: ...

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain values."""
        ...
