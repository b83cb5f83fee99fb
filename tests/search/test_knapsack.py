"""A knapsack's search for steps to leave out ends, however often leaving one out saves a little."""

from neural_mp.core.precision import OpConfig, Precision
from neural_mp.search import assignment
from neural_mp.search.assignment import Form, Knapsack


def test_the_search_for_steps_to_leave_out_ends(monkeypatch):
    bits = (OpConfig(Precision.INT4), OpConfig(Precision.INT8))
    forms = {
        f"op{number}": [Form(bits[0], 1.0, number + 1.0), Form(bits[1], 2.0 + number, 0.0)]
        for number in range(40)
    }
    filled = Knapsack._fill_greedily
    searches: list[int] = []

    def count_searches(self, noise, banned):
        searches.append(len(banned))
        filling, chosen = filled(self, noise, frozenset())
        # Each step that is left out saves more.
        return assignment.Filling(filling.forms, filling.cost / 2 ** len(banned), 0.0), chosen

    monkeypatch.setattr(Knapsack, "_fill_greedily", count_searches)
    assert Knapsack.from_forms(forms).find_cheapest_filling(0.5).cost > 0
    assert max(searches) == assignment.MAX_LEFT_OUT
