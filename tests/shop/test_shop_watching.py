"""Pages for operators of the shop: the front page and the numbers for Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from shop.lines import lines


def test_the_front_page_shows_every_limit_and_what_became_of_it(street):
    """Each rule is listed with its limit from the policy, and the refusals so far."""
    ada = street.customer("ada")
    ada.passes("POST", "/checkout", 11)
    page = street.customer(None, "203.0.113.9").get("/").body.decode()
    for rule in street.app.state.gate.policy.rules:
        assert f"<td>{rule.name}<" in page
    assert "<td>checkout<td>POST /checkout<td>user or ip<td>token bucket 5/s burst 10<td" in page
    assert "free: token bucket 20/s burst 40, pro: token bucket 100/s burst 200, enterprise: unlimited" in page
    assert "12 requests: 11 passed, 1 refused" in page
    assert 'class="n r">1</tr>' in page


def test_the_front_page_shows_the_lines_to_type_for_its_own_address(street):
    """The printed commands can be pasted: they name the requested host."""
    page = street.customer().get("/").body.decode()
    assert "&#x27;http://shop.test/login?name=ada&#x27;" in page
    assert all(line.says in page for line in lines("http://shop.test"))


def test_prometheus_sees_what_was_passed_and_refused(street):
    """The numbers at /metrics are those of the requests, by rule and never by user."""
    street.customer("ada").passes("POST", "/checkout", 11)
    text = street.customer().get("/metrics").body.decode()
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("rule") == "checkout"
    ]
    counted = {(sample.name, sample.labels.get("outcome")): sample.value for sample in samples}
    assert 10.0 in counted.values()
    assert 1.0 in counted.values()
    assert "ada" not in text
