"""How many examples a property is tried on: few while typing, enough in CI and the same on every run, many at night.

`pytest --hypothesis-profile=quick|ci|nightly`; CI's is the default. CI tries the same examples each time, so that a
failure is there again when somebody looks; the nightly profile draws new ones and remembers what failed.
"""

from itertools import combinations, product

from hypothesis import HealthCheck, settings

_SHARE = {"quick": 0.1, "ci": 0.3, "nightly": 5.0}
_FEWEST = 5
# A busy machine is no defect of a property, and a fixture per test is enough where examples name places of their own.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def register_profiles():
    """Register the three profiles and load CI's."""
    for name, share in _SHARE.items():
        night = name == "nightly"
        settings.register_profile(
            name,
            max_examples=int(100 * share),
            derandomize=not night,
            database=settings.default.database if night else None,
            **_COMMON,
        )
    settings.load_profile("ci")


def examples(count):
    """A decorator: `count` examples, as the profile multiplies them.

    Without it a property has a hundred, multiplied alike.
    """
    share = _SHARE.get(settings.get_current_profile_name(), 1.0)
    return settings(max_examples=max(min(count, _FEWEST), round(count * share)))


def at_night(every, in_ci):
    """All cases of a test at night, a few that differ most in CI; `in_ci` are members of `every`, in its order."""
    left_out = [case for case in in_ci if case not in every]
    assert not left_out, f"{left_out} are no cases"
    return list(every if nightly() else in_ci)


def crossed(*values):
    """Cases of several parameters: all combinations at night, in CI so many that every value comes in one.

    With three parameters or more, so many that every two values of different parameters meet in one.
    """
    values = [list(of_one) for of_one in values]
    places = list(product(*(range(len(of_one)) for of_one in values)))
    chosen = places if nightly() else _covering(places, min(2, len(values) - 1))
    return [tuple(of_one[at] for of_one, at in zip(values, case, strict=True)) for case in chosen]


def _covering(places, together):
    """Those of `places` that show, `together` at a time, all that meets in any; the one that shows most comes next."""
    shown = {case: {*combinations(enumerate(case), together)} for case in places}
    unseen, chosen = set().union(*shown.values()), []
    while unseen:
        case = max(places, key=lambda case: len(shown[case] & unseen))
        unseen -= shown[case]
        chosen.append(case)
    return sorted(chosen)


def nightly():
    """Whether there is time for what CI leaves out."""
    return settings.get_current_profile_name() == "nightly"
