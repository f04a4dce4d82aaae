import pytest

from kit.confinement.stand_ins import overridden, replaced


class Base:
    inherited = "base"

    @staticmethod
    def fixed():
        return "fixed"


class Owner(Base):
    own = "own"


@pytest.mark.parametrize("exchange", [replaced, overridden])
def test_an_attribute_is_exchanged_for_a_block_and_put_back_after_an_error(exchange):
    with pytest.raises(ZeroDivisionError), exchange(Owner, "own", "new"):
        assert Owner.own == "new"
        1 / 0  # noqa: B018
    assert Owner.own == "own"


def test_a_static_method_stays_one():
    with replaced(Base, "fixed", None):
        assert Base.fixed is None
    assert Base().fixed() == "fixed"


def test_what_is_inherited_is_overridden_but_never_replaced():
    with overridden(Owner, "inherited", "new"):
        assert (Owner.inherited, Base.inherited) == ("new", "base")
    assert "inherited" not in vars(Owner)
    message = "Owner has no attribute inherited of its own"
    with pytest.raises(AttributeError, match=message), replaced(Owner, "inherited", "new"):
        pass


def test_exchanges_may_be_nested():
    with replaced(Owner, "own", 1), replaced(Owner, "own", 2):
        assert Owner.own == 2
    assert Owner.own == "own"
