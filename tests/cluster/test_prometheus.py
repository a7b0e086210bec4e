"""Of what Ray's agents show, the project's own metrics and nothing else; and what Prometheus is told to read."""

import json

import pytest
import yaml

from cluster.prometheus import main, merged, own_samples, scrape_config

pytestmark = pytest.mark.fast

AGENT = """# HELP ray_node_cpu_utilization Total CPU usage on a ray node
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{NodeAddress="10.0.0.7",SessionName="session_1"} 12.5
# HELP ray_grpo_serve_requests_total Requests
# TYPE ray_grpo_serve_requests_total counter
ray_grpo_serve_requests_total{NodeAddress="10.0.0.7",otel_scope_name="ray",route="/v1/models",status="200"} 3.0
# HELP ray_grpo_train_loss loss
# TYPE ray_grpo_train_loss gauge
ray_grpo_train_loss{SessionName="session_1",run="a \\"b\\",} NodeAddress=\\"c\\""} -0.5
ray_grpo_train_loss{SessionName="session_1"} 1.0
python_info{version="3.11"} 1.0
"""


def test_only_lines_of_the_prefix_stay_and_only_labels_of_ours():
    assert own_samples(AGENT, "ray_grpo_").splitlines() == [
        "# HELP ray_grpo_serve_requests_total Requests",
        "# TYPE ray_grpo_serve_requests_total counter",
        'ray_grpo_serve_requests_total{route="/v1/models",status="200"} 3.0',
        "# HELP ray_grpo_train_loss loss",
        "# TYPE ray_grpo_train_loss gauge",
        'ray_grpo_train_loss{run="a \\"b\\",} NodeAddress=\\"c\\""} -0.5',
        "ray_grpo_train_loss 1.0",
    ]


def test_the_same_series_of_two_nodes_is_one_counters_added_gauges_their_largest():
    first = "# TYPE x_total counter\nx_total 3.0\n# TYPE g gauge\ng 0.75\n"
    second = '# TYPE x_total counter\nx_total 4.0\nx_total{a="1"} 1.0\n# TYPE g gauge\ng 0.5\n'
    assert merged([first, second]).splitlines() == [
        "# TYPE x_total counter",
        "x_total 7.0",
        'x_total{a="1"} 1.0',
        "# TYPE g gauge",
        "g 0.75",
    ]


def test_a_histograms_parts_stay_under_its_name():
    text = '# TYPE h histogram\nh_bucket{le="1.0"} 2.0\nh_count 2.0\nh_sum 1.5\n# TYPE h_more gauge\nh_more 1.0\n'
    assert merged([text, text]).splitlines() == [
        "# TYPE h histogram",
        'h_bucket{le="1.0"} 4.0',
        "h_count 4.0",
        "h_sum 3.0",
        "# TYPE h_more gauge",
        "h_more 1.0",
    ]


def test_the_configuration_names_rays_list_of_nodes_whatever_its_path(tmp_path):
    path = tmp_path / 'a "b": #c' / "nodes.json"
    tree = yaml.safe_load(scrape_config(path, 7))
    assert tree["global"]["scrape_interval"] == "7s"
    (job,) = tree["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [str(path)]


def test_the_command_prints_it_and_says_when_ray_has_not_started(tmp_path, capsys):
    path = tmp_path / "nodes.json"
    assert main(["--discovery", str(path)]) == 0
    said = capsys.readouterr()
    assert json.dumps(str(path)) in said.out
    assert "is not there yet" in said.err
    path.write_text("[]")
    assert main(["--discovery", str(path)]) == 0
    assert capsys.readouterr().err == ""
