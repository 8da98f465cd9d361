"""The table of QAT hardware."""

import pytest

from accelplane.plugins.qat.models import BY_VF_DRIVER, MODELS, model_of_pf, model_of_vf

TABLE = [
    ("dh895xccvf", "dh895xcc", "0442 0443", "0434 0435", False),
    ("c4xxxvf", "c4xxx", "18a1", "18a0", False),
    ("c3xxxvf", "c3xxx", "19e3", "19e2", False),
    ("c6xxvf", "c6xx", "37c9", "37c8", False),
    ("d15xxvf", "d15xx", "6f55", "6f54", False),
    ("4xxxvf", "4xxx", "4941 4943 4945", "4940 4942 4944", True),
    ("420xxvf", "420xx", "4947", "4946", True),
    ("6xxxvf", "6xxx", "4949", "4948", True),
]


@pytest.mark.parametrize(("vf_driver", "pf_driver", "vf_ids", "pf_ids", "detects"), TABLE)
def test_a_model_is_found_by_each_of_its_ids_and_drivers(
    vf_driver: str, pf_driver: str, vf_ids: str, pf_ids: str, detects: bool
) -> None:
    model = BY_VF_DRIVER[vf_driver]
    assert model == (vf_driver, pf_driver, tuple(vf_ids.split()), tuple(pf_ids.split()), detects)
    for number in model.vf_ids:
        assert model_of_vf(number) is model_of_vf(f"0x{number}") is model
        assert model_of_pf(number) is None
    for number in model.pf_ids:
        assert model_of_pf(number) is model_of_pf(f"0x{number}") is model
        assert model_of_vf(number) is None


def test_the_table_has_no_other_models_and_a_pf_driver_is_the_vf_driver_without_its_suffix() -> None:
    assert [model.vf_driver for model in MODELS] == [row[0] for row in TABLE]
    assert all(model.vf_driver == model.pf_driver + "vf" for model in MODELS)
