""" What several processes do together, with real processes """
import json
import sys

import timm_splicemix as tsm

SCRIPT = '''
import json, sys
import torch
import timm_splicemix as tsm

torch.distributed.init_process_group('gloo')
mixer = tsm.SpliceMix('2x3', seed=5)
mixer.set_step(2, 9)
record, = mixer.plan(12).records
rank = torch.distributed.get_rank()
with open(f'{sys.argv[1]}/{rank}.json', 'w') as file:
    json.dump(record.sources.tolist(), file)
torch.distributed.destroy_process_group()
'''


def test_each_process_draws_for_its_own_rank(run, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = run(sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone', script, tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1)]
    assert drawn[0] != drawn[1]
    for rank in (0, 1):
        mixer = tsm.SpliceMix('2x3', seed=5, rank=rank)
        mixer.set_step(2, 9)
        assert mixer.plan(12).records[0].sources.tolist() == drawn[rank]
