"""Declarations: none fails, none claims what cannot be kept, and the level has all that it asks for."""

from __future__ import annotations

from lmcache.testing.capabilities import CAPABILITIES
from lmcache.testing.runner import Run
from lmcache.v1.platform.base.device_spec import DeviceSpec, MPTransferMode


def test_the_level_s_capabilities_are_declared(run: Run) -> None:
    missing = run.capabilities.missing_for(run.level)
    told = {name: run.capabilities.faults.get(name, _not_so(name)) for name in missing}
    assert not told, f"level {run.level} needs: {told}"


def _not_so(name: str) -> str:
    return f"not declared; expected that {CAPABILITIES[name].what}"


def test_no_declaration_raises(run: Run) -> None:
    assert not run.capabilities.faults


def test_a_capability_is_not_claimed_without_what_it_needs(spec: DeviceSpec) -> None:
    if spec.is_lmcache_driven_available():
        assert spec.missing_for_lmcache_driven() == (), (
            "lmcache-driven transfers are claimed without all members"
        )
        assert hasattr(spec.get_ops(), "record_completion_on_stream"), (
            "lmcache-driven transfers are claimed without stream-ordered completion"
        )
    assert spec.is_lmcache_driven_available() == spec.is_handle_transfer_available()


def test_auto_is_resolved_to_a_mode_that_can_be_delivered(spec: DeviceSpec) -> None:
    mode = spec.default_mp_transfer_mode()
    assert mode in (MPTransferMode.ENGINE_DRIVEN, MPTransferMode.LMCACHE_DRIVEN)
    if mode is MPTransferMode.LMCACHE_DRIVEN:
        assert spec.is_lmcache_driven_available()
        assert spec.missing_for_lmcache_driven() == ()


def test_every_op_says_what_it_serves_and_takes(spec: DeviceSpec) -> None:
    from lmcache.v1.platform.base.op_contract import CONTRACT_OPS, FORMAT_OPS

    ops = spec.get_ops()
    present = [name for name in sorted(CONTRACT_OPS) if hasattr(ops, name)]
    for name in present:
        formats = ops.supported_formats(name)  # raises where it is not declared
        assert formats or name not in FORMAT_OPS, f"{name} is there and serves no format"
        assert ops.operand_kinds(name) <= {"tensors", "pointers"}


def test_a_native_module_is_bound_without_refusals(spec: DeviceSpec) -> None:
    report = spec.get_ops().binding_report()
    assert not report.refused, f"functions that cannot be called as the contract says: {report.refused}"
