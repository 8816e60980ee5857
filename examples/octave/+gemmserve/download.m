function a = download(id)
% DOWNLOAD  Download the array of that id.
%
%   a = gemmserve.download(id)
  a = gemmserve.read_npy(gemmserve.request(['/v1/arrays/' id '/data'], '--header', 'Accept: application/x-npy'));
end
